"""References between keys: `${model.width}` stands for the value of that key, once all layers are merged."""

from dataclasses import replace

from common.config.layers import node_of
from common.config.problem import ABSENT, ConfigError, Problem, join, shorten
from common.config.schema import nearest
from common.config.source import Node, by_key, fill_in, plain, references_in


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
