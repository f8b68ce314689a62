"""Validate a tree of nodes against a schema: gives the configuration, or every problem at once.

Pydantic checks all values in one pass. Wrong ones are then replaced by their defaults, so that the further rules, the
checks attached to fields and `problems` of each section, can still run, and no mistake hides another.
"""

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from common.base.parts import installed, needs, part_of
from common.config.problem import ABSENT, DEFAULT, ConfigError, Problem, is_within, join, rule_of
from common.config.schema import child, run_checks, section_of, suggest
from common.config.source import Node, by_key, plain

T = TypeVar("T")


def check(schema: type[T], tree: Node, problems: Sequence[Problem] = ()) -> tuple[T, dict[str, str]]:
    """Return the configuration, and where each key of it was written. Raises `ConfigError` with all problems.

    `problems`: those found earlier. Further problems of the same keys follow from them, and are omitted.
    """
    values = plain(tree)
    mistakes = list(problems)
    adapter = TypeAdapter(schema)
    config = None
    try:
        config = adapter.validate_json(json.dumps(values))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        paths = [_path(each["loc"], values) for each in errors]
        _add(mistakes, _problems_of(errors, values, schema))
        for path in paths:
            _drop(values, path)
        with suppress(ValidationError):  # a key is required, and has no default
            config = adapter.validate_json(json.dumps(values))
    _add(mistakes, run_checks(schema, values, ""))
    _add(mistakes, _broken_rules(config, {problem.key for problem in mistakes}))
    places = {key: node.origin for key, node in by_key(tree) if key}
    if config is None or mistakes:
        raise ConfigError([_add_origin(problem, places) for problem in mistakes])
    return config, places


def _add(mistakes: list[Problem], more: Iterable[Problem]) -> None:
    """Add problems that do not follow from earlier ones. A mistake in a list is one of the whole list."""
    known = [problem.key.partition("[")[0] for problem in mistakes]
    for new in more:
        follows = False
        for key in known:
            if key and (is_within(new.key, key) or is_within(key, new.key)):
                follows = True
        if new not in mistakes and not follows:
            mistakes.append(new)


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
    by_value: dict[str, tuple[Any, list[ErrorDetails]]] = {}
    for error in errors:
        path = _path(error["loc"], values)
        name = error["loc"][-1]
        key = reduce(join, path, "")
        value = reduce(getitem, path, values)
        if error["type"] == "unexpected_keyword_argument":
            yield _unknown_key(schema, path, value)
        elif error["type"] == "missing" and isinstance(name, str):
            yield Problem(join(key, name), ABSENT, "is required")
        else:
            by_value.setdefault(key, (value, []))[1].append(error)
    for key, (value, of_value) in by_value.items():
        deeper = [other for other in by_value if other != key and is_within(other, key)]
        if not deeper:
            yield Problem(key, value, rule_of(of_value))


def _unknown_key(schema: type, path: Sequence[str | int], value: Any) -> Problem:
    """Return the problem of a key that its section does not have, but perhaps another section or a part."""
    key = reduce(join, path, "")
    part = part_of(key)
    if part is not None and part not in installed():
        return Problem(key, value, needs(part), is_unknown=True)
    *above, name = path
    parent = section_of(reduce(child, above, schema)) or schema
    hint = suggest(schema, parent, key.removesuffix(str(name)), str(name))
    return Problem(key, value, "unknown key", hint, is_unknown=True)


def _drop(values: Any, path: Sequence[str | int]) -> None:
    """Remove the value at `path`; in a list, the whole list."""
    keys: list[Any] = []
    for part in path:
        if isinstance(part, int):
            break
        keys.append(part)
    with suppress(KeyError):  # a section that contains it is gone already
        if keys:
            reduce(getitem, keys[:-1], values).pop(keys[-1])


def _broken_rules(made: Any, known: Collection[str], key: str = "") -> Iterator[Problem]:
    """Collect the `problems` of every section below `made`. `known`: keys with problems."""
    parts: dict[Any, Any] = {}
    if dataclasses.is_dataclass(made):
        parts = vars(made)
    elif isinstance(made, list):
        parts = dict(enumerate(made))
    for part, below in parts.items():
        yield from _broken_rules(below, known, join(key, part))
    if not hasattr(made, "problems"):
        return
    try:
        for problem in made.problems():
            yield dataclasses.replace(problem, key=join(key, problem.key))
    except ValueError as error:  # a rule was applied to a value that a check rejected
        if not any(other.startswith(key) for other in known):
            yield Problem(key, ABSENT, str(error))


def _add_origin(problem: Problem, places: Mapping[str, str]) -> Problem:
    """`problem` with the origin of its key, or of the nearest enclosing section that was written."""
    if problem.origin is not None:
        return problem
    key = problem.key
    while key and places.get(key, DEFAULT) == DEFAULT:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return dataclasses.replace(problem, origin=places.get(key, DEFAULT))
