"""The entry points: files and options, or layers of plain values, as one checked configuration.

`${model.width}` stands for the value of that key, once all layers are merged. In the stored config of an earlier run, a
key that this version does not have is no typo: it is dropped, with a warning that names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic_core import to_jsonable_python

from common.config.check import check
from common.config.layers import complete, find_file, flatten, merge, node_of
from common.config.overrides import layer_of, read_options
from common.config.problem import DEFAULT, RESERVED, ConfigError, Problem, join, nearest, shorten
from common.config.schema import items_of
from common.config.source import Node, by_key, fill_in, plain, read_file, references_in

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
    found = [find_file("--config", str(file), Path()) for file in files]
    tree = Node({}, DEFAULT)
    dropped: list[Problem] = []
    for path, body in flatten(found).items():
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
    tree = complete(merge(tree, layer_of(keys, schema), schema), schema)
    references = References(tree)
    tree = complete(references.resolve(tree) or tree, schema)
    config, origins = check(schema, tree, problems + references.problems)
    return Resolved(config, to_jsonable_python(config), origins, warnings_about(dropped))


def overlaid(schema: type[T], *layers: Mapping[str, Any]) -> T:
    """Return a section from layers of plain values, each laid over the last. Raises `ConfigError`."""
    tree = Node({}, DEFAULT)
    for layer in layers:
        tree = merge(tree, node_of(dict(layer), DEFAULT), schema)
    config, _ = check(schema, complete(tree, schema))
    return config


class References:
    """Replaces the references in a tree that holds a node for every key, the defaults too.

    Attributes:
        problems: values that cannot be read or resolved, each once. They are omitted.
    """

    def __init__(self, tree: Node) -> None:
        self.problems: list[Problem] = []
        self._nodes = dict(by_key(tree))

    def resolve(self, node: Node, key: str = "", trail: tuple[str, ...] = ()) -> Node | None:
        """Return the node at `key` with the values of all references in it; None if it has a problem.

        `trail`: references that led here.
        """
        if node.problem:
            self._refuse(key, node.problem)
            return None
        if isinstance(node.value, (dict, list)):
            parts = {}
            for name, part in items_of(node.value):
                filled = self.resolve(part, join(key, name), trail)
                if filled is not None:
                    parts[name] = filled
            is_whole = len(parts) == len(node.value)
            if isinstance(node.value, dict) and (is_whole or not trail):
                return replace(node, value=parts)
            if is_whole:
                return replace(node, value=list(parts.values()))
            return None
        if not node.refers:
            return node
        return self._filled(node, key, trail)

    def _filled(self, node: Node, key: str, trail: tuple[str, ...]) -> Node | None:
        """As `resolve`, for text with references."""
        if key in trail:
            loop = trail[trail.index(key) :]
            start = loop.index(min(loop))  # the same for each of its keys, so that the problem is reported once
            path = (*loop[start:], *loop[: start + 1])
            self._refuse(path[0], "the references are circular", " -> ".join(path))
            return None
        places = [node.origin]
        texts: dict[str, str] = {}
        for name in references_in(node.value):
            if name not in self._nodes:
                hint = ""
                near = nearest(name, self._nodes)
                if near is not None:
                    hint = f"did you mean {near}?"
                self._refuse(key, f"there is no key {name}", hint)
                return None
            target = self.resolve(self._nodes[name], name, (*trail, key))
            if target is None:
                return None
            places.append(f"${{{name}}}: {target.origin}")
            if node.value == f"${{{name}}}":
                return node_of(target, ", ".join(places))
            if isinstance(target.value, (dict, list)):
                self._refuse(key, f"{name} is a section or a list, which cannot be part of a string")
                return None
            texts[name] = target.value
            if not isinstance(target.value, str):
                texts[name] = shorten(target.value)
        return Node(fill_in(node.value, texts), ", ".join(places))

    def _refuse(self, key: str, rule: str, hint: str = "") -> None:
        node = self._nodes[key]
        problem = Problem(key, plain(node), rule, hint, node.origin)
        if problem not in self.problems:
            self.problems.append(problem)


def is_record(file: Path) -> bool:
    """Return whether a YAML file lies in the folder of a run, so that the program wrote it, not a person."""
    return file.with_name("run.json").is_file()


def read_record(tree: Node, schema: type) -> tuple[Node, list[Problem]]:
    """Return a stored config without its unknown keys, completed with defaults; and these keys.

    The arguments of schedules were keys once: they are moved, and dropped only if the schedule does not have them.
    """
    tree = complete(tree, schema)
    dropped: list[Problem] = []
    while True:  # of a list, a check names the first key only
        unknown: dict[str, Problem] = {}
        try:
            check(schema, tree)
        except ConfigError as error:
            unknown = {problem.key: problem for problem in error.problems if problem.is_unknown}
        is_done = True
        for key, node in list(by_key(tree)):
            if not isinstance(node.value, dict):
                continue
            for name in list(node.value):
                problem = unknown.get(join(key, name))
                if problem is None:
                    continue
                is_done = False
                item = node.value.pop(name)
                if key.endswith("optim.lr_scheduler"):
                    args = node.value.setdefault("args", Node({}, item.origin))
                    args.value[name] = item
                else:
                    dropped.append(problem)
        if is_done:
            return tree, dropped


def warnings_about(dropped: Sequence[Problem]) -> list[str]:
    """Return the warning about keys that were dropped, with their values, if there are any."""
    if not dropped:
        return []
    text = "this run is of an earlier version of the project, which had keys that are now ignored:"
    for problem in dropped:
        text += f"\n  {problem.key} = {shorten(problem.value, 200)}  ({problem.origin})"
    return [text]
