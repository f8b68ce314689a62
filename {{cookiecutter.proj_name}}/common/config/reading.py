"""Nodes -> plain values: variables and references are replaced, numbers and words are read.

`${model.width}` stands for the value of that key, once all layers are merged; `${env:NAME}` for an environment
variable; `$$` for a dollar.
"""

import os
import re
from typing import Any

from common.config.problem import ABSENT, Problem, did_you_mean, join, shorten
from common.config.schema import child, items_of, only_text
from common.config.source import Node, scalar

# $$, ${env:NAME}, ${env:NAME:-default}, ${section.key}, or the beginning of something else
_VARIABLE = re.compile(r"\$(?:(\$)|\{env:([A-Za-z_]\w*)(?::-([^}]*))?\}|\{([^\s${}:]+)\}|\{)")


class Reader:
    """Reads a tree that holds a node for every key, the defaults too.

    Attributes:
        values: plain data, without what has a problem.
        origins: where each key was written; for a reference, its target too.
        problems: each once.
    """

    def __init__(self, tree: Node, annotation: Any = Any) -> None:
        self.problems: list[Problem] = []
        self.origins: dict[str, str] = {}
        self._nodes: dict[str, tuple[Node, Any]] = {}
        self._refused: set[str] = set()
        self._collect(tree, annotation, "")
        self.values = self._read(tree, annotation, "", ())
        del self.origins[""]

    def _collect(self, node: Node, annotation: Any, key: str) -> None:
        self._nodes[key] = (node, annotation)
        for part, inner in items_of(node.value):
            self._collect(inner, child(annotation, part), join(key, part))

    def _read(self, node: Node, annotation: Any, key: str, trail: tuple[str, ...]) -> Any:
        """Return the value of the node at `key`; ABSENT if it has a problem. `trail`: references that led here."""
        self.origins[key] = node.origin
        value = node.value
        if key in self._refused:
            return ABSENT
        if node.problem:
            return self._refuse(key, node, node.problem)
        if isinstance(value, (dict, list)):
            parts = {}
            for part, inner in items_of(value):
                found = self._read(inner, child(annotation, part), join(key, part), trail)
                if found is not ABSENT:
                    parts[part] = found
            if len(parts) < len(value) and (trail or isinstance(value, list)):
                return ABSENT
            if isinstance(value, list):
                return list(parts.values())
            return parts
        if isinstance(value, str):
            value = self._filled(node, annotation, key, trail)
        if only_text(annotation) and isinstance(value, (bool, int, float)):
            return shorten(value)
        return value

    def _filled(self, node: Node, annotation: Any, key: str, trail: tuple[str, ...]) -> Any:
        """Return the value of text: without its variables; the target's value if it is one reference."""
        if key in trail:
            loop = (*trail[trail.index(key) :], key)
            return self._refuse(key, node, "the references are circular", " -> ".join(loop))

        def target(name: str) -> Any:
            if name not in self._nodes:
                raise ValueError(f"there is no key {name}", did_you_mean(name, {each: each for each in self._nodes}))
            value = self._read(*self._nodes[name], name, (*trail, key))
            if value is ABSENT:  # its own problem
                raise ValueError
            self.origins[key] += f", ${{{name}}}: {self.origins[name]}"
            return value

        def text_of(match: re.Match[str]) -> str:
            dollar, variable, default, name = match.groups()
            if dollar:
                return "$"
            if variable:
                value = os.environ.get(variable, "")
                if value or (default is None and variable in os.environ):
                    return value
                if default is None:
                    remedy = f"set it, or write ${{env:{variable}:-default}}"
                    raise ValueError(f"the environment variable {variable} is not set", remedy)
                return default  # as in a shell, also for an empty variable
            if not name:
                raise ValueError("write ${section.key}, ${env:NAME}, ${env:NAME:-default}, or $$ for a dollar")
            value = target(name)
            if isinstance(value, (dict, list)):
                raise ValueError(f"{name} is a section or a list, which cannot be part of a string")
            if isinstance(value, str):
                return value
            return shorten(value)

        try:
            match = _VARIABLE.fullmatch(node.value)
            if match and match[4]:
                return target(match[4])
            text = _VARIABLE.sub(text_of, node.value)
        except ValueError as error:
            return self._refuse(key, node, *error.args)
        word = scalar(text)
        # A reference in it, which `target` has added to the origin, makes it text.
        if node.quoted or self.origins[key] != node.origin or (word is not None and only_text(annotation)):
            return text  # as typed
        return word

    def _refuse(self, key: str, node: Node, rule: str = "", hint: str = "") -> Any:
        value = node.value
        if isinstance(value, list):
            value = ABSENT
        self._refused.add(key)
        if rule:  # else the problem is that of a target
            self.problems.append(Problem(key, value, rule, hint, node.origin))
        return ABSENT
