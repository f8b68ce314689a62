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

from common.config.problem import ABSENT, DEFAULT, ConfigError, Origin, Problem, overlapping, rule_of
from common.config.schema import Key, bare, child, keys_of, run_checks, section_of, suggest
from common.config.source import Node, by_key, plain

T = TypeVar("T")
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def check(schema: type[T], tree: Node, problems: list[Problem]) -> tuple[T, dict[str, Origin]]:
    """The configuration and where each of its keys was written. Raises `ConfigError` with every problem.

    `problems`: those found earlier. Further problems of the same keys follow from them, and are left out.
    """
    checker = _Checker(schema, list(problems))
    config: T = checker.section(tree.value, schema, "")
    keys = [problem.key for problem in problems if problem.key]
    places = {key: node.origin for key, node in by_key(tree) if key}
    found = [
        _placed(each, places) for each in checker.problems if each in problems or not overlapping([each.key], keys)
    ]
    if found:
        raise ConfigError([problem for at, problem in enumerate(found) if problem not in found[:at]])
    return config, places


@dataclasses.dataclass
class _Checker:
    """Walks nodes and schema together, and collects problems."""

    root: type
    problems: list[Problem]

    def section(self, entries: Mapping[str, Node], schema: type, key: str) -> Any:
        """The section at `key`; ABSENT if a required key is missing."""
        prefix = f"{key}." if key else ""
        for name, node in entries.items():
            if name not in keys_of(schema):
                hint = "it is only allowed at the top level of a file"
                hint = hint if name == "$BASE" else suggest(self.root, schema, prefix, name)
                self.problems.append(Problem(prefix + name, plain(node), "unknown key", hint, node.origin))
        values = {name: self._field(entries.get(name), field, prefix + name) for name, field in keys_of(schema).items()}
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

    def _field(self, node: Node | None, field: Key, key: str) -> Any:
        """The value of one field; its default if it is missing or wrong."""
        if node is None:
            self.problems += [Problem(key, ABSENT, "is required")] if field.default is ABSENT else []
            return field.default
        below, item = section_of(field.annotation), child(field.annotation, 0)
        if below is not None and isinstance(node.value, dict):
            made = self.section(node.value, below, key)
            return field.default if made is ABSENT else made
        if section_of(item) is not None and isinstance(node.value, list):  # a list of sections
            one = Key("", item, "", ABSENT)
            items = [self._field(each, one, f"{key}[{at}]") for at, each in enumerate(node.value)]
            return field.default if ABSENT in items else items
        value = plain(node)
        if dataclasses.is_dataclass(bare(field.annotation)):
            self.problems.append(Problem(key, value, "must be a section"))
            return field.default
        try:
            made = TypeAdapter(field.annotation, config=_STRICT).validate_json(json.dumps(value))
        except ValidationError as error:
            self.problems += _problems_of(error, value, key)
            return field.default
        self.problems += run_checks(field.annotation, value, key)
        return made


def _placed(problem: Problem, places: Mapping[str, Origin]) -> Problem:
    """`problem` with the origin of its key, or of the nearest enclosing section that was written."""
    key = problem.key
    while key and places.get(key, DEFAULT) == DEFAULT:
        key = key.rpartition("." if key[-1] != "]" else "[")[0]
    return dataclasses.replace(problem, origin=problem.origin or places.get(key, DEFAULT))


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
            yield Problem(at, value, rule_of(items))
