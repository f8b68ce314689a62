"""The stored config of an earlier run: a key that this version does not have is dropped, with a warning that names it.

In a record, an unknown key is no typo: it was valid when the run was trained.
"""

from collections.abc import Sequence
from pathlib import Path

from common.config.check import check
from common.config.layers import complete
from common.config.problem import ConfigError, Problem, join, shorten
from common.config.source import Node, by_key


def is_record(file: Path) -> bool:
    """Return whether a YAML file lies in the folder of a run, so that the program wrote it, not a person."""
    return file.with_name("run.json").is_file()


def read_record(tree: Node, schema: type) -> tuple[Node, list[Problem]]:
    """Return a stored config without its unknown keys, completed with defaults; and these keys."""
    tree = complete(tree, schema)
    try:
        check(schema, tree, [])
    except ConfigError as error:
        unknown = [problem for problem in error.problems if problem.is_unknown]
    else:
        unknown = []
    gone = [problem.key for problem in unknown]
    for key, node in list(by_key(tree)):
        names = list(node.value) if isinstance(node.value, dict) else []
        for name in names:
            if join(key, name) in gone:
                del node.value[name]
    return tree, unknown


def warning(dropped: Sequence[Problem]) -> str:
    """Write a warning about keys that were dropped, with their values; "" if there are none."""
    lines = [f"\n  {problem.key} = {shorten(problem.value, 200)}  ({problem.origin})" for problem in dropped]
    text = "this run is of an earlier version of the project, which had keys that are now ignored:"
    return "".join([text, *lines]) if lines else ""
