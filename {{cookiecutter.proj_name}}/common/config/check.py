"""Validate a tree of nodes against a schema: gives the configuration, or every problem at once.

Pydantic checks each value by itself, and a wrong value is replaced by its default. The further rules, the checks
attached to fields and then `problems` of each section, can therefore still run, and no mistake hides another.
"""

import copy
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

from common.config.problem import ABSENT, DEFAULT, ConfigError, Origin, Problem, rule_of
from common.config.schema import bare, child, keys_of, only_text, run_checks, section_of, suggest
from common.config.source import Node, list_items, scalar_node

T = TypeVar("T")
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def check(schema: type[T], tree: Node, problems: list[Problem]) -> tuple[T, dict[str, Origin]]:
    """The configuration and where each of its keys was written. Raises `ConfigError` with every problem.

    `problems`: those found earlier. Further problems of the same keys follow from them, and are left out.
    """
    checker = _Checker(schema, problems)
    config: T = checker.section(tree.value, schema, "", ABSENT)
    keys = [problem.key for problem in problems if problem.key]
    found = [checker.placed(each) for each in checker.problems if each in problems or not overlapping([each.key], keys)]
    if found:
        raise ConfigError([problem for at, problem in enumerate(found) if problem not in found[:at]])
    return config, checker.places


def draft(schema: type, tree: Node) -> tuple[dict[str, Any], dict[str, Origin]]:
    """The values of an unfinished configuration, and where each was written, by key. Its problems are not reported."""
    checker = _Checker(schema, [], is_draft=True)
    values = to_jsonable_python(checker.section(tree.value, schema, "", ABSENT))
    return dict(by_key(values)), checker.places


class _Checker:
    """Walks nodes and schema together; collects problems, and where each value was written."""

    def __init__(self, root: type, problems: list[Problem], is_draft: bool = False) -> None:
        self.root = root
        self.problems = list(problems)
        self.is_draft = is_draft
        self.places: dict[str, Origin] = {}

    def section(self, entries: Mapping[str, Node], schema: type, key: str, default: Any) -> Any:
        """The section at `key`; ABSENT if a required key is missing. `default`: its value if nothing is written."""
        prefix = f"{key}." if key else ""
        for name, node in entries.items():
            if name not in keys_of(schema):
                self._report_unknown(schema, prefix, name, node)
        values = {}
        for name, field in keys_of(schema).items():
            otherwise = field.default if default is ABSENT else getattr(default, name)
            values[name] = self._field(entries.get(name), field.annotation, prefix + name, otherwise)
        if self.is_draft:
            return schema(**{name: None if value is ABSENT else value for name, value in values.items()})
        if ABSENT in values.values():
            return ABSENT
        made, known = default, [problem.key for problem in self.problems]
        try:
            made = schema(**values)
            for problem in made.problems() if hasattr(made, "problems") else ():
                at = prefix + problem.key
                if not overlapping([at], known):
                    self.problems.append(dataclasses.replace(problem, key=at))
        except ValueError as error:  # from a `__post_init__`, or a rule applied to a value that a check rejected
            if not any(other.startswith(prefix) for other in known):
                self.problems.append(Problem(key, ABSENT, str(error)))
        return made

    def _field(self, node: Node | None, annotation: Any, key: str, default: Any) -> Any:
        """The value of one field; its default if it is missing or wrong."""
        below = section_of(annotation)
        if node is None:
            return self._default(annotation, key, default)
        if below is not None and isinstance(node.value, dict) and not node.problem:
            self.places[key] = node.origin
            made = self.section(node.value, below, key, ABSENT)
            return default if made is ABSENT else made
        item = child(annotation, 0)
        if section_of(item) is not None and isinstance(node.value, list) and not node.problem:  # a list of sections
            self.places[key] = node.origin
            items = [self._field(one, item, f"{key}[{at}]", ABSENT) for at, one in enumerate(node.value)]
            return default if ABSENT in items else items
        before = len(self.problems)
        plain = self._plain(node, annotation, key)
        if dataclasses.is_dataclass(bare(annotation)) and not isinstance(plain, dict):
            self.problems.append(Problem(key, plain, "must be a section"))
        if len(self.problems) > before:
            return default
        try:
            value = TypeAdapter(annotation, config=_STRICT).validate_json(json.dumps(plain))
        except ValidationError as error:
            self.problems += _problems_of(error, plain, key)
            return default
        self.problems += () if self.is_draft else run_checks(annotation, plain, key)
        return value

    def _default(self, annotation: Any, key: str, default: Any) -> Any:
        if dataclasses.is_dataclass(default):
            return self.section({}, type(default), key, default)
        if default is ABSENT:
            self.problems.append(Problem(key, ABSENT, "is required"))
        else:
            self.problems += () if self.is_draft else run_checks(annotation, to_jsonable_python(default), key)
        return copy.deepcopy(default)  # a copy: configurations must not share it

    def _plain(self, node: Node, annotation: Any, key: str) -> Any:
        """The node as plain data, in the form that suits the type: text for a text field, a list for `0,1,2`."""
        self.places[key] = node.origin
        if node.problem:
            self.problems.append(Problem(key, _shown(node.value), node.problem))
        text, value = node.text, node.value
        if isinstance(value, str) and (items := list_items(text or value, annotation, quoted=text is None)):
            value = [scalar_node(item, False, node.origin) for item in items]
        if isinstance(value, list):
            return [self._plain(item, child(annotation, at), f"{key}[{at}]") for at, item in enumerate(value)]
        if isinstance(value, dict):
            return {name: self._plain(item, child(annotation, name), f"{key}.{name}") for name, item in value.items()}
        return text if text is not None and value is not None and only_text(annotation) else value

    def _report_unknown(self, parent: type, prefix: str, name: str, node: Node) -> None:
        hint = (
            "it is only allowed at the top level of a file"
            if name == "$BASE"
            else suggest(self.root, parent, prefix, name)
        )
        self.problems.append(Problem(prefix + name, _shown(node.value), "unknown key", hint, node.origin))

    def placed(self, problem: Problem) -> Problem:
        """`problem` with the origin of its key, or of the nearest enclosing section that was written."""
        key = problem.key
        while key not in self.places and key:
            key = key.rpartition("." if key[-1] != "]" else "[")[0]
        return dataclasses.replace(problem, origin=problem.origin or self.places.get(key, DEFAULT))


def _problems_of(error: ValidationError, plain: Any, key: str) -> Iterator[Problem]:
    """Pydantic's errors, one for each value. Of a union's alternatives, those with the deepest errors count."""
    found: dict[str, tuple[Any, list[ErrorDetails]]] = {}
    for item in error.errors(include_url=False):
        at, value = key, plain
        for part in item["loc"]:  # some parts name alternatives of unions, which are not in the data
            if isinstance(value, dict) and part in value:
                at, value = f"{at}.{part}", value[part]
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                at, value = f"{at}[{part}]", value[part]
        found.setdefault(at, (value, []))[1].append(item)
    for at, (value, items) in found.items():
        if not any(other != at and _is_within(other, at) for other in found):
            yield Problem(at, ABSENT if isinstance(value, dict) else value, rule_of(items))


def by_key(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """A value and all that it contains, by dotted key."""
    yield key, value
    if isinstance(value, (dict, list)):
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from by_key(inner, join(key, part))


def _shown(value: Any) -> Any:
    return ABSENT if isinstance(value, (dict, list)) else value


def join(key: str, part: str | int) -> str:
    """The dotted key of the item at a key or index of the value at `key`."""
    return f"{key}[{part}]" if isinstance(part, int) else f"{key}.{part}".removeprefix(".")


def overlapping(keys: Collection[str], others: Collection[str]) -> list[str]:
    """Those of `others` that lie in one of `keys`, or contain one. A list counts as a whole."""
    whole = [key.partition("[")[0] for key in keys]
    return [each for each in others if any(_is_within(each, key) or _is_within(key, each) for key in whole)]


def _is_within(key: str, above: str) -> bool:
    return key == above or key.startswith((f"{above}.", f"{above}["))
