"""Validate a tree of nodes against a schema: gives the configuration, or every problem at once.

Pydantic checks all values in one pass. Wrong ones are then replaced by their defaults, so that the further rules, the
checks attached to fields and `problems` of each section, can still run, and no mistake hides another.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import takewhile
from operator import getitem
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from common.base.parts import installed, needs, part_of
from common.config.problem import ABSENT, DEFAULT, ConfigError, Problem, join, overlapping, rule_of
from common.config.schema import child, run_checks, section_of, suggest
from common.config.source import Node, by_key, plain

T = TypeVar("T")


def check(schema: type[T], tree: Node, problems: list[Problem]) -> tuple[T, dict[str, str], list[Problem]]:
    """Return the configuration, where each key of it was written, and warnings. Raises `ConfigError` with all problems.

    `problems`: those found earlier. Further problems of the same keys follow from them, and are omitted.
    """
    values = plain(tree)
    mistakes = list(problems)

    def add(more: Iterable[Problem]) -> None:
        known = [problem.key for problem in mistakes if problem.key and not problem.warns]
        for new in more:
            if new not in mistakes and not overlapping([new.key], known):
                mistakes.append(new)

    adapter = TypeAdapter(schema)
    config = None
    try:
        config = adapter.validate_json(json.dumps(values))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        add(_problems_of(errors, values, schema))
        for path in [_path(error["loc"], values) for error in errors]:
            _drop(values, path)
        with suppress(ValidationError):  # a key is required, and has no default
            config = adapter.validate_json(json.dumps(values))
    add(run_checks(schema, values, ""))
    add(_broken_rules(config, [problem.key for problem in mistakes if not problem.warns]))
    places = {key: node.origin for key, node in by_key(tree) if key}
    mistakes = [_add_origin(problem, places) for problem in mistakes]
    if config is None or not all(problem.warns for problem in mistakes):
        raise ConfigError([problem for problem in mistakes if not problem.warns])
    return config, places, mistakes


def _path(loc: Sequence[str | int], values: Any) -> list[str | int]:
    """Return the keys and indices in the data that lead to an error; other parts of its `loc` name union members."""
    path: list[str | int] = []
    for part in loc:
        known: Any = ()
        if isinstance(values, dict):
            known = values
        elif isinstance(values, list):
            known = range(len(values))
        if part in known:
            path.append(part)
            values = values[part]
    return path


def _problems_of(errors: Iterable[ErrorDetails], values: Any, schema: type) -> Iterator[Problem]:
    """Pydantic's errors, one for each value. Of a union's alternatives, those with the deepest errors count."""
    deepest: dict[str, tuple[Any, list[ErrorDetails]]] = {}
    for error in errors:
        path = _path(error["loc"], values)
        name = error["loc"][-1]
        key = reduce(join, path, "")
        value = reduce(getitem, path, values)
        if error["type"] == "unexpected_keyword_argument":
            parent = section_of(reduce(child, path[:-1], schema)) or schema
            hint = suggest(schema, parent, reduce(join, [*path[:-1], ""], ""), str(name))
            if name == "$BASE":
                hint = "it is only allowed at the top level of a file"
            brings = part_of(key)
            if brings is not None and brings not in installed():
                yield Problem(key, value, needs(brings), is_unknown=True)
            else:
                yield Problem(key, value, "unknown key", hint, is_unknown=True)
        elif error["type"] == "missing" and isinstance(name, str):
            yield Problem(join(key, name), ABSENT, "is required")
        else:
            deepest.setdefault(key, (value, []))[1].append(error)
    for key, (value, of_value) in deepest.items():
        if not any(other.startswith((f"{key}.", f"{key}[")) for other in deepest):
            joined = isinstance(value, str) and ":" in value and of_value[0]["type"] == "dataclass_type"
            yield Problem(key, value, rule_of(of_value), "write a space after the colon" if joined else "")


def _drop(values: Any, path: Sequence[str | int]) -> None:
    """Remove the value at `path`; in a list, the whole list."""
    keys = list(takewhile(lambda part: isinstance(part, str), path))
    with suppress(KeyError):  # a section that contains it is gone already
        if keys:
            reduce(getitem, keys[:-1], values).pop(keys[-1])


def _broken_rules(made: Any, known: Sequence[str], key: str = "") -> Iterator[Problem]:
    """Collect the `problems` of every section below `made`. `known`: keys with problems."""
    parts: dict[Any, Any] = {}
    if dataclasses.is_dataclass(made):
        parts = vars(made)
    elif isinstance(made, list):
        parts = dict(enumerate(made))
    for part, below in parts.items():
        yield from _broken_rules(below, known, join(key, part))
    try:
        for problem in made.problems() if hasattr(made, "problems") else ():
            yield dataclasses.replace(problem, key=join(key, problem.key))
    except ValueError as error:  # a rule was applied to a value that a check rejected
        if not any(other.startswith(key) for other in known):
            yield Problem(key, ABSENT, str(error))


def _add_origin(problem: Problem, places: Mapping[str, str]) -> Problem:
    """`problem` with the origin of its key, or of the nearest enclosing section that was written."""
    key = problem.key
    while key and places.get(key, DEFAULT) == DEFAULT:
        key = key.rpartition("." if key[-1] != "]" else "[")[0]
    return dataclasses.replace(problem, origin=problem.origin or places.get(key, DEFAULT))
