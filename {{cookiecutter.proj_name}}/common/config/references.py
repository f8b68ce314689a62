"""References between keys: `${model.width}` stands for the value of that key, once all layers are merged."""

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from common.config.check import draft, join, overlapping
from common.config.layers import node_of
from common.config.problem import ABSENT, DEFAULT, Origin, Problem, shorten
from common.config.schema import nearest
from common.config.source import Node, fill_in, references_in

_MISSING = Node(None, DEFAULT)


def resolve_references(schema: type, tree: Node, problems: list[Problem]) -> tuple[Node, dict[str, str]]:
    """`tree` with every reference replaced by the value of its target, and the references as written, by key.

    A target's value is the one that the run's config.yaml will hold, so references mean the same in a resumed run.
    Values that cannot be read or resolved are left out, and added to `problems`.
    """
    found: dict[str, Node] = {}
    _filled(tree, {}, found)
    waiting = {key: node for key, node in found.items() if node.refers}
    broken = found.keys() - waiting
    problems += [
        Problem(key, each.value, each.problem, origin=each.origin) for key, each in found.items() if each.problem
    ]
    done: dict[str, Node] = {}
    while waiting:
        needs = {key: overlapping(references_in(node.value), waiting) for key, node in waiting.items()}
        ready = [key for key in waiting if not needs[key]]
        if not ready:
            problems += [_loop(key, needs, waiting) for key in waiting]
            break
        values, places = draft(schema, _filled(tree, done, found))
        for key in ready:
            node = waiting.pop(key)
            if overlapping(references_in(node.value), broken):
                broken.add(key)
            elif isinstance(made := _resolved(key, node, {**dict.fromkeys(found), **values}, places), Node):
                done[key] = made
            else:
                problems.append(made)
                broken.add(key)
    return _filled(tree, done, found), {key: node.value for key, node in found.items() if node.refers}


def _filled(node: Node, done: Mapping[str, Node], found: dict[str, Node], key: str = "") -> Node:
    """The tree with the references that are done. Leaves out the others, and values that cannot be read.

    All of these are added to `found`, by key.
    """
    if node.refers or (node.problem and isinstance(node.value, str)):
        found[key] = node
        return done.get(key, _MISSING)
    if isinstance(node.value, dict):
        parts = {name: _filled(each, done, found, join(key, name)) for name, each in node.value.items()}
        return replace(node, value={name: each for name, each in parts.items() if each is not _MISSING})
    if isinstance(node.value, list):
        items = [_filled(each, done, found, join(key, at)) for at, each in enumerate(node.value)]
        # Without one item, the others would be counted differently.
        return _MISSING if any(each is _MISSING for each in items) else replace(node, value=items)
    return node


def _resolved(key: str, node: Node, values: Mapping[str, Any], places: Mapping[str, Origin]) -> Node | Problem:
    """The value of a text with references: that of the target if there is no other text, else text."""
    names = references_in(node.value)
    origin = Origin(", ".join([str(node.origin), *(f"${{{name}}}: {places.get(name, DEFAULT)}" for name in names)]))
    for name in names:
        if name not in values:
            return Problem(key, node.value, f"there is no key {name}", _hint(name, values), node.origin)
        if node.value == f"${{{name}}}":
            return node_of(values[name], origin)
        if isinstance(values[name], (dict, list)):
            return Problem(
                key, node.value, f"{name} is a section or a list, which cannot be a part of text", "", origin
            )
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
