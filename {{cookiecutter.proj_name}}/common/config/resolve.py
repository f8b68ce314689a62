"""The entry points: files and options, or layers of plain values, as one checked configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic_core import to_jsonable_python

from common.config.check import check
from common.config.layers import complete, find_file, flatten, merge, node_of
from common.config.overrides import layer_of, read_options
from common.config.problem import DEFAULT, RESERVED, Problem
from common.config.record import is_record, read_record, warning
from common.config.references import References
from common.config.source import Node, read_file

T = TypeVar("T")


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A checked configuration.

    `values` is all of it as plain data, including defaults; `origins` is where each value was written, by dotted key;
    `warnings` are texts for the log: what is wrong but does not refuse it, and keys of an earlier run without a meaning
    today.
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
    stored: Node | None = None,
    overlay: str | Path | None = None,
) -> Resolved[T]:
    """Files and their bases, then the overlay's own values, then command line words, as one checked configuration.

    Args:
        stored: the config of an earlier run, instead of files. A file in the folder of a run is such a config too.

    Raises:
        ConfigError: with every problem at once.
    """
    options, problems = read_options(overrides)
    keys = {name: option for name, option in options.items() if name not in RESERVED}
    bodies = flatten([find_file("--config", str(path), Path()) for path in files])
    tree = Node({}, DEFAULT)
    dropped = list[Problem]()
    for path, body in bodies.items():
        if is_record(path):
            body, unknown = read_record(body, schema)
            dropped += unknown
        tree = merge(tree, body, schema)
    if stored is not None:
        tree, dropped = read_record(stored, schema)
    tree = complete(tree, schema)  # so `--model.width 3` changes the default model, not a model without a type
    if overlay is not None:  # its own values only: the configuration below it already has bases
        body = read_file(find_file("--debug", str(overlay), Path()))
        body.value.pop("$BASE", None)
        tree = complete(merge(tree, body, schema), schema)
    tree = complete(merge(tree, layer_of(keys, schema, tree), schema), schema)
    references = References(tree)
    tree = complete(references.resolve(tree) or tree, schema)
    config, origins, warns = check(schema, tree, problems + references.problems)
    lines = "".join(f"\n{problem}" for problem in warns)
    warnings = [text for text in (warning(dropped), lines and f"in the configuration:{lines}") if text]
    return Resolved(config, to_jsonable_python(config), origins, warnings)


def overlaid(schema: type[T], *layers: Mapping[str, Any]) -> T:
    """Return a section from layers of plain values, each laid over the last. Raises `ConfigError`."""
    tree = Node({}, DEFAULT)
    for layer in layers:
        tree = merge(tree, node_of(dict(layer), DEFAULT), schema)
    return check(schema, complete(tree, schema), [])[0]
