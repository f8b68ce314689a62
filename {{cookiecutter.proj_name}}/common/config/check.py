"""A tree of nodes against a schema: every problem at once, or the finished configuration."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from common.config.layers import data_of
from common.config.problem import ABSENT, DEFAULT, ConfigError, Origin, Problem, SectionCheck, rule_of
from common.config.schema import admits, child, keys_of, members, metadata, only_text, section_of, suggest
from common.config.source import Node, scalar_node

T = TypeVar("T")
_Path: TypeAlias = tuple[Any, ...]  # of str and int


def check(schema: type[T], tree: Node, problems: list[Problem]) -> tuple[T, dict[str, Origin]]:
    """The configuration and where each of its keys was written. Raises `ConfigError` with everything that is wrong.

    `problems`: what reading the files and the command line found already.
    """
    fitter = Fitter(schema)
    plain = fitter.fit(tree, schema, ())
    found = [*problems, *fitter.problems]
    known = {problem.key for problem in found if problem.key}
    config, wrong = _validate(schema, plain, known)
    checked = _run_checks(schema, plain, "", {problem.key for problem in wrong})
    found += wrong + [item for item in checked if item.key not in known]
    if found or config is None:
        placed = [_placed(problem, fitter.places) for problem in found]
        raise ConfigError([problem for at, problem in enumerate(placed) if problem not in placed[:at]])
    return config, fitter.places


def _placed(problem: Problem, places: dict[str, Origin]) -> Problem:
    """`problem` with the origin of its key, or of the nearest section around it that was written down."""
    if problem.origin is not None:
        return problem
    key = problem.key
    while key not in places and key:
        key = key.rpartition("." if key[-1] != "]" else "[")[0]
    return dataclasses.replace(problem, origin=places.get(key, DEFAULT))


class Fitter:
    """Walks nodes and schema together: finds unknown keys, applies the text forms, notes where each value stands."""

    def __init__(self, root: type):
        self.root = root
        self.problems: list[Problem] = []
        self.places: dict[str, Origin] = {}

    def fit(self, node: Node, annotation: Any, path: _Path) -> Any:
        """The plain data to validate; what is wrong with its structure goes to `problems`."""
        key = _dotted(path)
        self.places[key] = node.origin
        if node.problem:
            self.problems.append(Problem(key, node.value, node.problem))
        node = _comma_list(node, annotation)
        if isinstance(node.value, list):
            return [self.fit(item, child(annotation, at), (*path, at)) for at, item in enumerate(node.value)]
        if isinstance(node.value, dict):
            below = section_of(annotation)
            return {
                name: self.fit(item, child(annotation, name), (*path, name))
                for name, item in node.value.items()
                if self._is_known(below, name, item, f"{key}." if key else "")
            }
        number = isinstance(node.value, (bool, int, float))
        return node.text if number and node.text is not None and only_text(annotation) else node.value

    def _is_known(self, parent: type | None, name: str, node: Node, prefix: str) -> bool:
        if name == "$BASE":
            hint = "it belongs at the top of a file"
        elif parent is None or name in keys_of(parent):
            return True
        else:
            hint = suggest(self.root, parent, prefix, name)
        value = ABSENT if isinstance(node.value, (dict, list)) else node.value
        self.problems.append(Problem(prefix + name, value, "unknown key", hint, node.origin))
        return False


def _comma_list(node: Node, annotation: Any) -> Node:
    """`0,1,2` as a list, where the field takes a list and no text."""
    if node.text is None or "," not in node.text or not admits(annotation, list) or admits(annotation, str, Any):
        return node
    pieces = node.text.removesuffix(",").split(",")
    return Node([scalar_node(piece.strip(), False, node.origin) for piece in pieces], node.origin)


def _validate(schema: type[T], plain: Any, known: set[str]) -> tuple[T | None, list[Problem]]:
    """The configuration, if there is one, and all that is wrong except for the `known` keys.

    A rule of a section is only asked when everything in it is right. So a key at fault gives way to its default, and
    all is asked again. A rule that names such a key is not reported: it was broken by the default.
    """
    adapter, found, replaced = TypeAdapter(schema), list[Problem](), set[str]()
    while True:
        try:
            return adapter.validate_json(json.dumps(plain), strict=True), found
        except ValidationError as error:
            wrong = _from_pydantic(error, plain, replaced)
        before = plain
        for problem, path in wrong:
            found += [problem] if problem.key not in known | replaced else []
            replaced.add(problem.key)
            plain = _without(plain, path)
        if plain == before:
            return None, found


def _from_pydantic(error: ValidationError, plain: Any, replaced: set[str]) -> list[tuple[Problem, _Path]]:
    """Pydantic's errors by key, each with the path of what is at fault. Of the alternatives of a union, those count
    that went deepest into the data."""
    groups: dict[_Path, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        path = _path_of(item["loc"], plain)
        groups.setdefault((*path, item["loc"][-1]) if item["type"] == "missing" else path, []).append(item)
    found = []
    for path, items in groups.items():
        if path and any(other != path and other[: len(path)] == path for other in groups):
            continue
        rule, value = rule_of(items), _at(plain, path)
        cause = _dotted(path)
        if items[0]["type"] in ("value_error", "assertion_error"):
            cause, path, value = _blamed(rule, path, value, replaced)
        shown = ABSENT if isinstance(value, dict) else value
        found.append((Problem(cause, shown, rule), path[:-1] if value is ABSENT else path))
    return found


def _at(value: Any, path: _Path) -> Any:
    """What stands at `path`; ABSENT where nothing does."""
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return ABSENT
    return value


def _without(plain: Any, path: _Path) -> Any:
    """`plain` less what stands at `path`; a list goes whole."""
    if not path or path[0] not in plain:
        return plain
    others = {name: item for name, item in plain.items() if name != path[0]}
    whole = len(path) == 1 or isinstance(path[1], int)
    return others if whole else {**others, path[0]: _without(plain[path[0]], path[1:])}


def _dotted(path: _Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _below(key: str, above: str) -> bool:
    return key.startswith((f"{above}.", f"{above}["))


def _blamed(rule: str, path: _Path, section: Any, replaced: set[str]) -> tuple[str, _Path, Any]:
    """The key to report for a broken rule of a section, and path and value of the one to give way: the first key that
    the rule's words name, since that line is to be read; and before it, one there or below that has been replaced."""
    named = [(*path, *words.split(".")) for words in re.findall(r"\w+(?:\.\w+)*", rule.partition(";")[0])]
    causes = [key for key in replaced if any(key == name or _below(key, name) for name in map(_dotted, named))]
    written = [at for at in named if _at(section, at[len(path) :]) is not ABSENT]
    at = written[0] if written else path
    return (causes or [_dotted(at)])[0], at, _at(section, at[len(path) :])


def _path_of(location: tuple[str | int, ...], value: Any) -> _Path:
    """The path in the data at pydantic's location, which also names alternatives of unions; those stand in no data."""
    path: _Path = ()
    for part in location:
        if _at(value, (*path, part)) is not ABSENT:
            path = (*path, part)
    return path


def _run_checks(annotation: Any, value: Any, key: str, broken: set[str]) -> Iterator[Problem]:
    """The problems that the checks attached to fields find, defaults included; none where the type is wrong already."""
    below = section_of(annotation)
    if below is None and any(name == key or _below(name, key) for name in broken):
        return
    alternatives = members(annotation)
    attached = [annotation, *alternatives] if len(alternatives) > 1 else alternatives
    for item in (item for one in attached for item in metadata(one)):
        if isinstance(item, SectionCheck):
            yield from item.check(value, key)
    if below is not None and isinstance(value, dict):
        for name, field in keys_of(below).items():
            inner = value.get(name, ABSENT)
            if inner is ABSENT and field.default is not dataclasses.MISSING:
                inner = data_of(field.default)
            if inner is not ABSENT:
                yield from _run_checks(field.annotation, inner, f"{key}.{name}".removeprefix("."), broken)
    elif isinstance(value, (dict, list)):
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            at = f"{key}[{part}]" if isinstance(part, int) else f"{key}.{part}"
            if (below := child(annotation, part)) is not Any:
                yield from _run_checks(below, inner, at, broken)
