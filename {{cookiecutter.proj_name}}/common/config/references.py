"""References between keys: `${model.width}` stands for the value of that key, once all layers are merged."""

import os
from collections.abc import Collection
from dataclasses import replace

from common.config.layers import node_of
from common.config.problem import ABSENT, ConfigError, Problem, join, overlapping, shorten
from common.config.schema import nearest
from common.config.source import MOST_COPIED, Node, by_key, fill_in, plain, references_in

_LONGEST = 100_000  # characters of a text, and of the origins of its parts


class References:
    """Replaces the references in a tree that holds a node for every key, the defaults too.

    Attributes:
        problems: values that cannot be read or resolved. They are omitted.
    """

    def __init__(self, tree: Node) -> None:
        self.problems: list[Problem] = []
        self._nodes = dict(by_key(tree))
        self._copied = 0
        self._done: dict[str, Node | None] = {}

    def resolve(self, node: Node, key: str = "", trail: tuple[str, ...] = ()) -> Node | None:
        """Return the node at `key` with the values of all references in it; None if it has a problem.

        `trail`: keys of the references that led here.
        """
        if node.refers or node.problem:
            if key not in self._done:
                try:
                    self._done[key] = self._follow(node, key, trail)
                except ConfigError as error:
                    self._done[key] = None
                    self.problems += error.problems
            return self._done[key]
        if isinstance(node.value, dict):
            parts = {name: self.resolve(part, join(key, name), trail) for name, part in node.value.items()}
            return replace(node, value={name: part for name, part in parts.items() if part is not None})
        if isinstance(node.value, list):
            items = [self.resolve(item, join(key, at), trail) for at, item in enumerate(node.value)]
            return None if None in items else replace(node, value=items)  # without one, others would move up
        return node

    def _follow(self, node: Node, key: str, trail: tuple[str, ...]) -> Node:
        """Return the value of a text with references: that of the target if there is no other text, else text.

        Raises `ConfigError`, without a problem if one of a target is reported by itself.
        """

        def config_error(rule: str, hint: str = "") -> ConfigError:
            return ConfigError([Problem(key, plain(node), rule, hint, node.origin)])

        if node.problem:
            raise config_error(node.problem)
        if key in trail:
            loop = trail[trail.index(key) :]
            first = loop.index(min(loop))
            path = " -> ".join((*loop[first:], *loop[: first + 1]))
            origin = self._nodes[loop[first]].origin
            raise ConfigError([Problem(loop[first], ABSENT, "the references are circular", path, origin)])
        places = [node.origin]
        texts: dict[str, str] = {}
        for name in references_in(node.value):
            target = self._target(name, (*trail, key))
            if overlapping([name], [other for other, made in self._done.items() if made is None]):
                raise ConfigError([])
            if target is None:
                raise config_error(f"there is no key {name}", _hint(name, self._nodes))
            places.append(f"${{{name}}}: {target.origin}")
            if node.value == f"${{{name}}}":
                self._copied += sum(1 for _ in by_key(target))
                if self._copied > MOST_COPIED:
                    raise config_error(f"references must not add more than {MOST_COPIED:,} values")
                return node_of(target, ", ".join(places))
            if isinstance(target.value, (dict, list)):
                raise config_error(f"{name} is a section or a list, which cannot be part of a string")
            texts[name] = target.value if isinstance(target.value, str) else shorten(target.value)
        if sum(map(len, (*places, *texts.values()))) > _LONGEST:
            raise config_error(f"references must not stand for more than {_LONGEST:,} characters")
        return Node(fill_in(node.value, texts.__getitem__), ", ".join(places))

    def _target(self, name: str, trail: tuple[str, ...]) -> Node | None:
        """Return the value of the key `name`; None if there is none, or it has a problem."""
        for above, node in list(self._nodes.items()):
            if node.refers and name.startswith((f"{above}.", f"{above}[")):  # a key of a section that is a reference
                made = self.resolve(node, above, trail)
                if made:
                    self._nodes.update(by_key(made, above))
        if name not in self._nodes:
            return None
        return self.resolve(self._nodes[name], name, trail)


def _hint(name: str, known: Collection[str]) -> str:
    if name in os.environ:
        return f"for the environment variable, write ${{env:{name}}}"
    ends = {key.rpartition(".")[2]: key for key in known}
    near = nearest(name, known) or ends.get(nearest(name.rpartition(".")[2], ends) or "")
    return f"did you mean {near}?" if near else "--print-config shows all keys"
