"""YAML text -> nodes that remember where each value was written.

Numbers and words are read as YAML 1.2 does, not 1.1: `1e-5` is a number, `no`, `007` and `12:30:00` are text.
"""

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from common.config.problem import ABSENT, ConfigError, Origin, Problem, place

MAX_VALUES = 100_000  # per file, aliases unfolded: far above any real file, far below what fills a memory


@dataclass(frozen=True)
class Node:
    """One value as it was written.

    Attributes:
        value: a scalar, a list of nodes, or a dict of nodes.
        origin: where it was written.
        text: of a scalar without quotes, which may be what a text field wants; None for all others.
        replace: this mapping carries `$REPLACE: true`.
        problem: why this scalar has no value, if so. An error only where the value is used in the end.
    """

    value: Any
    origin: Origin
    text: str | None = None
    replace: bool = False
    problem: str = ""


@dataclass(frozen=True)
class File:
    """One file: its own values, the files it is based on, and the problems found in it."""

    path: Path
    body: Node
    bases: list[Node] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def plain_of(node: Node) -> Any:
    """The node as dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {name: plain_of(below) for name, below in node.value.items()}
    return [plain_of(item) for item in node.value] if isinstance(node.value, list) else node.value


# --- scalars -----------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.?(inf|Inf|INF)|\.?(nan|NaN|NAN)"
)
_NAMED = {word: value for name, value in (("true", True), ("false", False), ("null", None))
          for word in (name, name.capitalize(), name.upper())} | {"": None, "~": None, "None": None}  # fmt: skip
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)(?::-([^}]*))?\}|(\{))")


def scalar(text: str) -> Any:
    """The value of an unquoted word."""
    if text in _NAMED:
        return _NAMED[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def scalar_node(text: str, quoted: bool, origin: Origin) -> Node:
    """A scalar from its text: `${VAR}` filled in, then read as a number or word unless it was quoted."""
    try:
        text = _VARIABLE.sub(_variable, text)
    except ValueError as error:
        return Node(text, origin, problem=str(error))
    return Node(text, origin) if quoted else Node(scalar(text), origin, text)


def _variable(match: re.Match[str]) -> str:
    dollar, name, default, broken = match.groups()
    if dollar:
        return "$"
    if broken:
        raise ValueError("write ${NAME} or ${NAME:-default} for an environment variable, $$ for a dollar")
    found = os.environ.get(name)
    if default is not None:
        found = found or default  # as in a shell, `:-` also stands in for an empty variable
    if found is None:
        raise ValueError(f"the environment variable {name} is not set; set it, or write ${{{name}:-default}}")
    return found


# --- files -------------------------------------------------------------------------------------------------------

_TAG = "tag:yaml.org,2002:"
_UNQUOTED = "unquoted"


class _Loader(yaml.SafeLoader):
    """Only composes nodes, and marks unquoted untagged words: `scalar` reads those, not YAML 1.1's rules."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _UNQUOTED
        return super().resolve(kind, value, implicit)


def read_file(path: Path) -> File:
    """Read one YAML file, without its bases. Raises `ConfigError` when it is no readable YAML mapping."""
    start = Origin(place(path), 1)
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise _fatal(f"the file cannot be read: {error.strerror}", start) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n")
        raise _fatal("the file is not UTF-8 text; save it as UTF-8", _at(start, line)) from error
    problems: list[Problem] = []
    body = read_text(text, start, problems) or Node({}, start)
    if not isinstance(body.value, dict):
        raise _fatal('the top of the file must be a mapping of keys to values; write "key: value"', body.origin)
    base = body.value.pop("$BASE", Node([], start))
    bases = []
    for item in base.value if isinstance(base.value, list) else [base]:
        if isinstance(item.value, str) and not item.problem:
            bases.append(item)
        else:
            rule = item.problem or "must be a path or a list of paths"
            problems.append(Problem("$BASE", plain_of(item), rule, origin=item.origin))
    return File(path, body, bases, problems)


def read_text(text: str, start: Origin, problems: list[Problem]) -> Node | None:
    """YAML text as a node; None when there is nothing in it. Small mistakes go to `problems`, others raise.

    `start`: where the text begins; without a line (the command line), every node gets `start` itself as its origin.
    """
    try:
        root = yaml.compose(text, _Loader)
        return None if root is None else _Reader(start, problems).read(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        cause = ", ".join(filter(None, (error.context, error.problem)))
        raise _fatal(f"this is not readable as YAML: {cause}", _at(start, mark.line if mark else 0)) from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n")
        raise _fatal("a control character stands here; remove it", _at(start, line)) from error
    except RecursionError as error:
        raise _fatal("this is nested too deeply, or an alias stands inside itself", start) from error


def _fatal(rule: str, origin: Origin) -> ConfigError:
    return ConfigError([Problem("", ABSENT, rule, origin=origin)])


def _at(start: Origin, line: int) -> Origin:
    return start if start.line is None else Origin(start.source, start.line + line)


class _Reader:
    """Turns composed YAML nodes into ours; keeps a count, since aliases can unfold without end."""

    def __init__(self, start: Origin, problems: list[Problem]):
        self.start, self.problems = start, problems
        self.count = 0

    def read(self, node: yaml.Node) -> Node:
        origin = _at(self.start, node.start_mark.line)
        self.count += 1
        if self.count > MAX_VALUES:
            raise _fatal("the aliases of this file unfold to too many values; write the values out", origin)
        if node.tag not in (_UNQUOTED, f"{_TAG}str", f"{_TAG}seq", f"{_TAG}map"):
            rule = f"the tag {node.tag.replace(_TAG, '!!')} is not allowed"
            self.problems.append(Problem("", ABSENT, rule, "plain values only", origin))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, origin)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.read(item) for item in node.value], origin)
        return scalar_node(node.value, node.tag != _UNQUOTED, origin)

    def _mapping(self, node: yaml.MappingNode, origin: Origin) -> Node:
        merged, own = dict[str, Node](), dict[str, Node]()
        for key_node, value_node in node.value:
            name, value = key_node.value, self.read(value_node)
            at = _at(self.start, key_node.start_mark.line)  # the key's line: where a person looks
            if key_node.tag == _UNQUOTED and name == "<<":
                merged = self._merged(value) | merged
            elif not isinstance(name, str) or (key_node.tag == _UNQUOTED and not isinstance(scalar(name), str)):
                shown = name if isinstance(name, str) else "(a list or mapping)"
                self.problems.append(Problem(shown, ABSENT, "a key must be text", "put it in quotes", at))
            elif name in own:
                rule = f"the key stands twice, first at {own[name].origin}"
                self.problems.append(Problem(name, ABSENT, rule, origin=at))
            else:
                own[name] = replace(value, origin=at)
        flag = own.pop("$REPLACE", Node(False, origin))
        if not isinstance(flag.value, bool):
            self.problems.append(Problem("$REPLACE", plain_of(flag), "must be true or false", origin=flag.origin))
        return Node(merged | own, origin, replace=flag.value is True)

    def _merged(self, node: Node) -> dict[str, Node]:
        """The entries behind `<<: *name`; of a list of names the first wins."""
        found: dict[str, Node] = {}
        for item in node.value if isinstance(node.value, list) else [node]:
            if isinstance(item.value, dict):
                found = item.value | found
            else:
                self.problems.append(Problem("<<", plain_of(item), "must name a mapping", origin=item.origin))
        return found
