"""The stored config of an earlier run, brought to the keys of today.

In a record, an unknown key is no typo: it was valid when the run was trained. One that was renamed or moved gets its
name of today (`__renamed__` and `__stored__` beside the fields, `was` in a registry); any other is dropped.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from common.base.context import error_context
from common.config.check import check
from common.config.layers import complete, node_of, rename
from common.config.problem import DEFAULT, ConfigError, Problem, join, shorten
from common.config.source import Node, plain


def is_record(file: Path) -> bool:
    """Return whether a YAML file lies in the folder of a run, so that the program wrote it, not a person."""
    return file.with_name("run.json").is_file()


def read_record(tree: Node, schema: type) -> tuple[Node, list[Problem]]:
    """Read a stored config in the keys of today, completed with defaults.

    Returns:
        The config, and the keys that nothing of today stands for, which it lacks.
    """
    tree, dropped = complete(rename(tree, schema), schema), list[Problem]()
    while old := _of_earlier_versions(tree, schema):
        dropped += [problem for problem in old if not problem.today]
        today = {key: node_of(value, str(item.origin)) for item in old for key, value in (item.today or {}).items()}
        gone = {item.key for item in old if not any(f"{key}.".startswith(f"{item.key}.") for key in today)}
        tree = complete(_move_keys(tree, "", gone, today), schema)
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


def config_of_today(values: Mapping[str, Any], schema: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config in a checkpoint in the keys of today, as plain data; and the dropped values, by dotted key."""
    tree, dropped = read_record(node_of(dict(values), ""), schema)
    config = plain(tree)
    with suppress(ConfigError):  # as the config of a run is stored today
        config = to_jsonable_python(check(schema, tree, [])[0])
    return config, {problem.key: problem.value for problem in dropped}


def _of_earlier_versions(tree: Node, schema: type) -> list[Problem]:
    try:
        check(schema, tree, [])
    except ConfigError as error:
        return [problem for problem in error.problems if problem.today is not None]
    return []


def _move_keys(node: Node, key: str, gone: Collection[str], today: Mapping[str, Node]) -> Node:
    """Return the tree without the keys in `gone`, and with those in `today` unless the record itself gives them."""
    if isinstance(node.value, list):
        return replace(node, value=[_move_keys(item, join(key, at), gone, today) for at, item in enumerate(node.value)])
    if not isinstance(node.value, dict):
        return node
    entries = {name: item for name, item in node.value.items() if join(key, name) not in gone}
    for dotted, new in today.items():
        above, _, name = dotted.rpartition(".")
        if above == key and (name not in entries or name == "type" or entries[name].origin == DEFAULT):
            entries[name] = new
    return replace(node, value={name: _move_keys(item, join(key, name), gone, today) for name, item in entries.items()})
