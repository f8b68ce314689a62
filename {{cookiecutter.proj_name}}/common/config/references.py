"""References between keys: `${model.width}` stands for the value of that key, once all layers are merged."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from common.config.check import draft, join, overlapping
from common.config.layers import node_of
from common.config.problem import ABSENT, DEFAULT, ConfigError, Origin, Problem, shorten
from common.config.schema import nearest
from common.config.source import Node, fill_in, references_in

_MISSING = Node(None, DEFAULT)


def resolve_references(schema: type, tree: Node, problems: list[Problem]) -> tuple[Node, dict[str, str]]:
    """`tree` with every reference replaced by the value of its target, and the references as written, by key.

    A target's value is the one that the run's config.yaml will hold, so references mean the same in a resumed run.
    Values that cannot be read or resolved are left out, and added to `problems`.
    """
    found = dict(_unresolved(tree))
    waiting = {key: node for key, node in found.items() if node.refers}
    broken = found.keys() - waiting
    problems += [
        Problem(key, node.value, node.problem, origin=node.origin) for key, node in found.items() if node.problem
    ]
    done: dict[str, Node] = {}
    while waiting:
        needs = {key: overlapping(references_in(node.value), waiting) for key, node in waiting.items()}
        ready = [key for key in waiting if not needs[key]]
        if not ready:
            problems += [_loop(key, needs, waiting) for key in waiting]
            break
        values, places = draft(schema, _filled(tree, done))
        for key in ready:
            node = waiting.pop(key)
            try:
                if not overlapping(references_in(node.value), broken):
                    done[key] = _resolved(key, node, values, places, [*values, *found])
                    continue
            except ConfigError as error:
                problems += error.problems
            broken.add(key)
    return _filled(tree, done), {key: node.value for key, node in found.items() if node.refers}


def _unresolved(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    """The references, and the values that cannot be read, by key."""
    if node.refers or (node.problem and isinstance(node.value, str)):
        yield key, node
    for part, below in _parts(node):
        yield from _unresolved(below, join(key, part))


def _filled(node: Node, done: Mapping[str, Node], key: str = "") -> Node:
    """The tree with the references that are done, and without the other unresolved nodes."""
    if node.refers or (node.problem and isinstance(node.value, str)):
        return done.get(key, _MISSING)
    parts = {part: _filled(below, done, join(key, part)) for part, below in _parts(node)}
    if isinstance(node.value, dict):
        return replace(node, value={part: below for part, below in parts.items() if below is not _MISSING})
    if _MISSING in parts.values():  # without an item, the others would be counted differently
        return _MISSING
    return replace(node, value=[*parts.values()]) if parts else node


def _parts(node: Node) -> Iterable[tuple[Any, Node]]:
    """What a section or list contains, by key or index."""
    if isinstance(node.value, list):
        return enumerate(node.value)
    return node.value.items() if isinstance(node.value, dict) else ()


def _resolved(
    key: str, node: Node, values: Mapping[str, Any], places: Mapping[str, Origin], known: Collection[str]
) -> Node:
    """The value of a text with references: that of the target if there is no other text, else text."""
    names = references_in(node.value)
    origin = Origin(", ".join([str(node.origin), *(f"${{{name}}}: {places.get(name, DEFAULT)}" for name in names)]))
    for name in names:
        if name not in values:
            raise ConfigError([Problem(key, node.value, f"there is no key {name}", _hint(name, known), node.origin)])
        if node.value == f"${{{name}}}":
            return node_of(values[name], origin)
        if isinstance(values[name], (dict, list)):
            rule = f"{name} is a section or a list, which cannot be a part of text"
            raise ConfigError([Problem(key, node.value, rule, origin=origin)])
    texts = {name: value if isinstance(value := values[name], str) else shorten(value) for name in names}
    return Node(fill_in(node.value, texts.__getitem__), origin)


def _hint(name: str, known: Collection[str]) -> str:
    if name in os.environ:
        return f"for the environment variable, write ${{env:{name}}}"
    ends = {key.rpartition(".")[2]: key for key in known}
    near = nearest(name, known) or ends.get(nearest(name.rpartition(".")[2], ends) or "")
    return f"did you mean {near}?" if near else "--print-config shows all keys"


def _loop(key: str, needs: Mapping[str, list[str]], waiting: Mapping[str, Node]) -> Problem:
    """The loop that `key` leads into; the same problem for each of its keys."""
    chain = [key]
    while chain[-1] not in chain[:-1]:
        chain.append(needs[chain[-1]][0])
    loop = chain[chain.index(chain[-1]) + 1 :]
    first = loop.index(min(loop))
    loop = [*loop[first:], *loop[: first + 1]]
    return Problem(loop[0], ABSENT, "the references form a loop", " -> ".join(loop), waiting[loop[0]].origin)
