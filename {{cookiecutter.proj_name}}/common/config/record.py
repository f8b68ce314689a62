"""The stored config of an earlier run: a key that this version does not have is dropped, with a warning that names it.

In a record, an unknown key is no typo: it was valid when the run was trained.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from common.base.context import error_context
from common.config.check import check
from common.config.layers import complete, node_of
from common.config.problem import ConfigError, Problem, join, shorten
from common.config.source import Node, plain


def is_record(file: Path) -> bool:
    """Return whether a YAML file lies in the folder of a run, so that the program wrote it, not a person."""
    return file.with_name("run.json").is_file()


def read_record(tree: Node, schema: type) -> tuple[Node, list[Problem]]:
    """Return a stored config without its unknown keys, completed with defaults; and these keys."""
    tree = complete(tree, schema)
    dropped: list[Problem] = []
    while unknown := _unknown_keys(tree, schema):
        dropped += unknown
        tree = complete(_without(tree, "", [problem.key for problem in unknown]), schema)
    return tree, dropped


def warning(dropped: Sequence[Problem]) -> str:
    """Write a warning about keys that were dropped, with their values; "" if there are none."""
    lines = [f"\n  {problem.key} = {shorten(problem.value, 200)}  ({problem.origin})" for problem in dropped]
    text = "this run is of an earlier version of the project, which had keys that are now ignored:"
    return "".join([text, *lines]) if lines else ""


@contextmanager
def way_out(records: Sequence[Node]) -> Iterator[None]:
    """Add what to do to a `ConfigError` in the block that is about a value of one of the `records`."""
    sources = tuple(record.origin.partition(":")[0] for record in records)
    try:
        yield
    except ConfigError as error:
        if not any(str(problem.origin).startswith(sources) for problem in error.problems):
            raise
        with error_context(lambda: "this is the config of an earlier run; give new values, or a file: --config FILE"):
            raise


def known_part(values: Mapping[str, Any], schema: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config in a checkpoint without unknown keys, as plain data; and these values, by dotted key."""
    tree, dropped = read_record(node_of(dict(values), ""), schema)
    config = plain(tree)
    with suppress(ConfigError):  # as the config of a run is stored today
        config = to_jsonable_python(check(schema, tree, [])[0])
    return config, {problem.key: problem.value for problem in dropped}


def _unknown_keys(tree: Node, schema: type) -> list[Problem]:
    try:
        check(schema, tree, [])
    except ConfigError as error:
        return [problem for problem in error.problems if problem.is_unknown]
    return []


def _without(node: Node, key: str, gone: Collection[str]) -> Node:
    """Return the tree without the keys in `gone`."""
    if isinstance(node.value, list):
        return replace(node, value=[_without(item, join(key, at), gone) for at, item in enumerate(node.value)])
    if not isinstance(node.value, dict):
        return node
    kept = {name: item for name, item in node.value.items() if join(key, name) not in gone}
    return replace(node, value={name: _without(item, join(key, name), gone) for name, item in kept.items()})
