"""The entry points: files and options, or a tree of values, as one checked configuration.

In the stored config of an earlier run, a key that this version does not have is no typo: it is dropped, with a warning
that names it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic_core import to_jsonable_python

from common.config.check import Checker
from common.config.layers import find_file, flatten, merge, with_defaults
from common.config.overrides import lay_over, read_options
from common.config.problem import DEFAULT, RESERVED, ConfigError, join, origin_of, shorten, shown_path
from common.config.reading import Reader
from common.config.source import Node, node_of

T = TypeVar("T")


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A checked configuration.

    `values` is all of it as plain data, including defaults; `origins` is where each value was written, by dotted key;
    `warnings` are texts for the log: keys of an earlier run without a meaning today.
    """

    config: T
    values: dict[str, Any]
    origins: dict[str, str]
    warnings: Sequence[str] = ()


def resolve(
    schema: type[T],
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    stored: Mapping[str, Any] | None = None,
    origin: str = "the config of the run",
) -> Resolved[T]:
    """Files and their bases, then command line words, as one checked configuration.

    Args:
        stored: the config of an earlier run, below the files; `origin` names it. A file in the folder of a run is such
            a config too.

    Raises:
        ConfigError: with every problem at once.
    """
    options, problems = read_options(overrides)
    keys = {name: option for name, option in options.items() if name not in RESERVED}
    tree = Node({}, DEFAULT)
    records = []
    if stored is not None:
        tree = node_of(dict(stored), origin)
        records.append(origin)
    for file in files:
        for path, body in flatten(find_file("--config", str(file), Path())).items():
            if path.with_name("run.json").is_file():
                records.append(f"{shown_path(path)}:")
            tree = merge(tree, body, schema)
    tree = with_defaults(tree, schema)  # so `--model.width 3` changes the default model, not a model without a type
    reader = Reader(with_defaults(lay_over(tree, keys, schema), schema), schema)
    values = reader.values
    warning = ""
    while True:  # checked again without unknown keys of a stored config
        checker = Checker(schema, [*problems, *reader.problems], reader.origins)
        config = checker.section(schema, values)
        unknown = {}
        for problem in checker.problems:
            if problem.is_unknown and origin_of(problem.key, reader.origins).startswith(tuple(records)):
                unknown[problem.key] = problem
        kept = _without(values, unknown)
        if kept == values:
            break
        values = kept
        for key, problem in unknown.items():
            origin = origin_of(key, reader.origins)
            warning += f"\n  {key} = {shorten(problem.value, 200)}  ({origin})"
    if checker.problems:
        placed = []
        for problem in checker.problems:
            placed.append(replace(problem, origin=problem.origin or origin_of(problem.key, reader.origins)))
        raise ConfigError(placed)
    warnings = []
    if warning:
        text = "this run is of an earlier version of the project, which had keys that are now ignored:"
        warnings.append(text + warning)
    return Resolved(config, to_jsonable_python(config), reader.origins, warnings)


def _without(value: Any, unknown: Collection[str], key: str = "") -> Any:
    """`value` without the unknown keys, in lists too."""
    if isinstance(value, list):
        return [_without(item, unknown, join(key, number)) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        if join(key, name) not in unknown:
            kept[name] = _without(item, unknown, join(key, name))
    return kept
