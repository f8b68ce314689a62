"""A tree of nodes against a schema: every problem at once, or the finished configuration."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError

from common.config.layers import data_of
from common.config.problem import ABSENT, DEFAULT, ConfigError, Origin, Problem
from common.config.shape import admits, child, describe, keys_of, members, metadata, only_text, section_of, suggest
from common.config.source import Branch, Items, Leaf, Node, leaf

T = TypeVar("T")
_Path: TypeAlias = tuple[str | int, ...]


def check(schema: type[T], tree: Branch, problems: list[Problem]) -> tuple[T, dict[str, Origin]]:
    """The configuration and where each of its keys was written. Raises `ConfigError` with everything that is wrong.

    `problems`: what reading the files and the command line found already.
    """
    fitter = Fitter(schema)
    plain = fitter.fit(tree, schema, "")
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

    def fit(self, node: Node, annotation: Any, key: str) -> Any:
        """The plain data to validate; what is wrong with its structure goes to `problems`."""
        self.places[key] = node.origin
        if isinstance(node, Branch):
            return self._branch(node, annotation, key)
        if isinstance(node, Leaf):
            node = _comma_list(node, annotation)
        if isinstance(node, Items):
            below = (child(annotation, at) for at in range(len(node.items)))
            pairs = zip(node.items, below, strict=True)
            return [self.fit(item, inner or Any, f"{key}[{at}]") for at, (item, inner) in enumerate(pairs)]
        if node.problem:
            self.problems.append(Problem(key, node.raw, node.problem))
        number = isinstance(node.value, (bool, int, float))
        return node.raw if number and node.plain and only_text(annotation) else node.value

    def _branch(self, node: Branch, annotation: Any, key: str) -> dict[str, Any]:
        below = section_of(annotation)
        prefix = f"{key}." if key else ""
        plain = {}
        for name, item in node.entries.items():
            if name == "$BASE":
                rule = "$BASE belongs at the top of a file"
                self.problems.append(Problem(prefix + name, ABSENT, rule, origin=item.origin))
            elif below is not None and name not in keys_of(below):
                self._unknown(below, prefix, name, item)
            else:
                plain[name] = self.fit(item, child(annotation, name) or Any, prefix + name)
        return plain

    def _unknown(self, parent: type, prefix: str, name: str, node: Node) -> None:
        value = node.value if isinstance(node, Leaf) else ABSENT
        hint = suggest(self.root, parent, prefix, name)
        self.problems.append(Problem(prefix + name, value, "unknown key", hint, node.origin))


def _comma_list(node: Leaf, annotation: Any) -> Leaf | Items:
    """`0,1,2` as a list, where the field takes a list and no text."""
    if not (node.plain and isinstance(node.value, str) and "," in node.value):
        return node
    if not admits(annotation, list) or admits(annotation, str, Any):
        return node
    pieces = node.value.removesuffix(",").split(",")
    return Items([leaf(piece.strip(), True, node.origin) for piece in pieces], node.origin)


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
            wrong = _from_pydantic(error, schema, plain, replaced)
        before = plain
        for problem, path in wrong:
            found += [problem] if problem.key not in known | replaced else []
            replaced.add(problem.key)
            plain = _without(plain, path)
        if plain == before:
            return None, found


def _from_pydantic(error: ValidationError, schema: type, plain: Any, replaced: set[str]) -> list[tuple[Problem, _Path]]:
    """Pydantic's errors in plain words, each with the path of what is at fault: one per key, however many alternatives
    of a union refused it."""
    found: dict[str, tuple[Problem, _Path]] = {}
    for item in error.errors(include_url=False):
        path, value, annotation = _trace(item["loc"], schema, plain)
        key = _dotted(path)
        if item["type"] == "missing":
            name = str(item["loc"][-1])
            missing = _dotted((*path, name))
            rule = f"is required: {describe(child(annotation, name) or Any)}"
            found[missing] = Problem(missing, ABSENT, rule), path
        elif item["type"] in ("value_error", "assertion_error"):
            rule = str(item["ctx"]["error"])
            cause, path, value = _blamed(rule, path, value, replaced)
            found[key] = Problem(cause, _scalar(value), rule), path
        else:
            hint = "put it in quotes" if admits(annotation, str) and isinstance(value, (int, float)) else ""
            found.setdefault(key, (Problem(key, _scalar(value), f"must be {describe(annotation)}", hint), path))
    return [problem for key, problem in found.items() if not (key and any(_below(other, key) for other in found))]


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


def _scalar(value: Any) -> Any:
    return ABSENT if isinstance(value, dict) else value


def _blamed(rule: str, path: _Path, section: Any, replaced: set[str]) -> tuple[str, _Path, Any]:
    """The key to report for a broken rule of a section, and path and value of the one to give way: the first key that
    the rule's words name, since that line is to be read; and before it, one there or below that has been replaced."""
    named = [(*path, *words.split(".")) for words in re.findall(r"\w+(?:\.\w+)*", rule.partition(";")[0])]
    causes = [key for key in replaced if any(key == name or _below(key, name) for name in map(_dotted, named))]
    for words in named:
        found = section
        for name in words[len(path) :]:
            found = found.get(name, ABSENT) if isinstance(found, dict) else ABSENT
        if found is not ABSENT:
            return (causes or [_dotted(words)])[0], words, found
    return (causes or [_dotted(path)])[0], path, section


def _trace(location: _Path, schema: type, plain: Any) -> tuple[_Path, Any, Any]:
    """Path, value and type at pydantic's location, which also names alternatives of unions; those stand in no data."""
    path: _Path = ()
    value, annotation = plain, schema
    for at, part in enumerate(location):
        inside = (isinstance(value, dict) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        )
        if not inside:
            if isinstance(value, dict) and location[at + 1 : at + 2] and location[at + 1] in value:
                continue
            break
        value, annotation = value[part], child(annotation, part) or Any
        path = (*path, part)
    return path, value, annotation


def _run_checks(annotation: Any, value: Any, key: str, broken: set[str]) -> Iterator[Problem]:
    """The problems that the checks hung on fields find, defaults included; none where the type is wrong already."""
    below = section_of(annotation)
    if below is None and any(name == key or _below(name, key) for name in broken):
        return
    alternatives = members(annotation)
    hung = [annotation, *alternatives] if len(alternatives) > 1 else alternatives
    for item in (item for one in hung for item in metadata(one)):
        if callable(getattr(item, "check", None)):
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
            if (shape := child(annotation, part) or Any) is not Any:
                yield from _run_checks(shape, inner, at, broken)
