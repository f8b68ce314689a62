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
from common.config.problem import ABSENT, DEFAULT, RESERVED, ConfigError, Problem, join, nearest, shorten
from common.config.source import Node, by_key, fill_in, plain, read_file, references_in

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


class References:
    """Replaces the references in a tree that holds a node for every key, the defaults too.

    Attributes:
        problems: values that cannot be read or resolved, each once. They are omitted.
    """

    def __init__(self, tree: Node) -> None:
        self.problems: list[Problem] = []
        self._nodes = dict(by_key(tree))

    def resolve(self, node: Node, key: str = "") -> Node | None:
        """Return the node at `key` with the values of all references in it; None if it has a problem."""
        if isinstance(node.value, dict) and not node.problem:
            parts = {name: self.resolve(part, join(key, name)) for name, part in node.value.items()}
            return replace(node, value={name: part for name, part in parts.items() if part is not None})
        try:
            return self._filled(node, key, ())
        except ConfigError as error:
            self.problems += [problem for problem in error.problems if problem not in self.problems]
            return None

    def _filled(self, node: Node, key: str, trail: tuple[str, ...]) -> Node:
        """As `resolve`, but raises `ConfigError` for the first problem. `trail`: references that led here."""
        if node.problem:
            raise ConfigError([Problem(key, plain(node), node.problem, origin=node.origin)])
        if isinstance(node.value, dict):
            parts = {name: self._filled(part, join(key, name), trail) for name, part in node.value.items()}
            return replace(node, value=parts)
        if isinstance(node.value, list):
            return replace(node, value=[self._filled(item, join(key, at), trail) for at, item in enumerate(node.value)])
        if not node.refers:
            return node
        if key in trail:
            loop = trail[trail.index(key) :]
            first = loop.index(min(loop))
            path = (*loop[first:], *loop[: first + 1])
            origin = self._nodes[path[0]].origin
            raise ConfigError([Problem(path[0], ABSENT, "the references are circular", " -> ".join(path), origin)])
        places = [node.origin]
        texts: dict[str, str] = {}
        for name in references_in(node.value):
            if name not in self._nodes:
                near = nearest(name, self._nodes)
                hint = f"did you mean {near}?" if near else "--print-config shows all keys"
                raise ConfigError([Problem(key, plain(node), f"there is no key {name}", hint, node.origin)])
            target = self._filled(self._nodes[name], name, (*trail, key))
            places.append(f"${{{name}}}: {target.origin}")
            if node.value == f"${{{name}}}":
                return node_of(target, ", ".join(places))
            if isinstance(target.value, (dict, list)):
                rule = f"{name} is a section or a list, which cannot be part of a string"
                raise ConfigError([Problem(key, plain(node), rule, origin=node.origin)])
            texts[name] = target.value if isinstance(target.value, str) else shorten(target.value)
        return Node(fill_in(node.value, texts.__getitem__), ", ".join(places))


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
