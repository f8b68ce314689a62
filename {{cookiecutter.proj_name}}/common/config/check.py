"""Validate a tree of nodes against a schema: gives the configuration, or every problem at once.

Pydantic checks each value by itself, and a wrong value is replaced by its default. The further rules, the checks
attached to fields and then `problems` of each section, can therefore still run, and no mistake hides another.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from common.config.problem import ABSENT, DEFAULT, ConfigError, Origin, Problem, join, overlapping, rule_of
from common.config.schema import bare, child, keys_of, run_checks, section_of, suggest
from common.config.source import Node

T = TypeVar("T")
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def check(schema: type[T], tree: Node, problems: list[Problem]) -> tuple[T, dict[str, Origin]]:
    """The configuration and where each of its keys was written. Raises `ConfigError` with every problem.

    `problems`: those found earlier. Further problems of the same keys follow from them, and are left out.
    """
    checker = _Checker(schema, problems)
    config: T = checker.section(tree.value, schema, "")
    keys = [problem.key for problem in problems if problem.key]
    found = [checker.placed(each) for each in checker.problems if each in problems or not overlapping([each.key], keys)]
    if found:
        raise ConfigError([problem for at, problem in enumerate(found) if problem not in found[:at]])
    return config, checker.places


class _Checker:
    """Walks nodes and schema together; collects problems, and where each value was written."""

    def __init__(self, root: type, problems: list[Problem]) -> None:
        self.root = root
        self.problems = list(problems)
        self.places: dict[str, Origin] = {}

    def section(self, entries: Mapping[str, Node], schema: type, key: str) -> Any:
        """The section at `key`; ABSENT if a required key is missing."""
        prefix = f"{key}." if key else ""
        for name, node in entries.items():
            if name not in keys_of(schema):
                self._report_unknown(schema, prefix, name, node)
        values = {
            name: self._field(entries.get(name), field.annotation, prefix + name, field.default)
            for name, field in keys_of(schema).items()
        }
        if ABSENT in values.values():
            return ABSENT
        known = [problem.key for problem in self.problems]
        try:
            made = schema(**values)
            for problem in made.problems() if hasattr(made, "problems") else ():
                at = prefix + problem.key
                if not overlapping([at], known):
                    self.problems.append(dataclasses.replace(problem, key=at))
        except ValueError as error:  # from a `__post_init__`, or a rule applied to a value that a check rejected
            if not any(other.startswith(prefix) for other in known):
                self.problems.append(Problem(key, ABSENT, str(error)))
            return ABSENT
        return made

    def _field(self, node: Node | None, annotation: Any, key: str, default: Any) -> Any:
        """The value of one field; its default if it is missing or wrong."""
        if node is None:
            self.problems += [Problem(key, ABSENT, "is required")] if default is ABSENT else []
            return default
        below, item = section_of(annotation), child(annotation, 0)
        self.places[key] = node.origin
        if below is not None and isinstance(node.value, dict) and not node.problem:
            made = self.section(node.value, below, key)
            return default if made is ABSENT else made
        if section_of(item) is not None and isinstance(node.value, list) and not node.problem:  # a list of sections
            items = [self._field(one, item, f"{key}[{at}]", ABSENT) for at, one in enumerate(node.value)]
            return default if ABSENT in items else items
        before = len(self.problems)
        plain = self._plain(node, key)
        if dataclasses.is_dataclass(bare(annotation)) and not isinstance(plain, dict):
            self.problems.append(Problem(key, plain, "must be a section"))
        if len(self.problems) > before:
            return default
        try:
            value = TypeAdapter(annotation, config=_STRICT).validate_json(json.dumps(plain))
        except ValidationError as error:
            self.problems += _problems_of(error, plain, key)
            return default
        self.problems += run_checks(annotation, plain, key)
        return value

    def _plain(self, node: Node, key: str) -> Any:
        """The node as plain data."""
        self.places[key] = node.origin
        if node.problem:
            self.problems.append(Problem(key, _shown(node.value), node.problem))
        if isinstance(node.value, list):
            return [self._plain(item, join(key, at)) for at, item in enumerate(node.value)]
        if isinstance(node.value, dict):
            return {name: self._plain(item, join(key, name)) for name, item in node.value.items()}
        return node.value

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
        while key and self.places.get(key, DEFAULT) == DEFAULT:
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
        if not any(other.startswith((f"{at}.", f"{at}[")) for other in found):
            yield Problem(at, ABSENT if isinstance(value, dict) else value, rule_of(items))


def _shown(value: Any) -> Any:
    return ABSENT if isinstance(value, (dict, list)) else value
