"""YAML text -> nodes that remember where each value was written.

Numbers and words are read as YAML 1.2 does, not 1.1: `1e-5` is a number, `no`, `007` and `12:30:00` are text.
"""

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from common.config.problem import ABSENT, ConfigError, Origin, Problem, place, shorten

MOST_VALUES = 100_000  # per file, aliases unfolded: far above any real file, far below what fills a memory


@dataclass
class Leaf:
    """One scalar. `raw` is its text; `plain`: written without quotes; `problem`: why it has no value, if so."""

    value: Any
    raw: str
    plain: bool
    origin: Origin
    problem: str = ""


@dataclass
class Items:
    """A list."""

    items: "list[Node]"
    origin: Origin


@dataclass
class Branch:
    """A mapping. `replace`: it carries `$REPLACE: true`."""

    entries: "dict[str, Node]"
    origin: Origin
    replace: bool = False


Node: TypeAlias = Leaf | Items | Branch


@dataclass
class File:
    """One file, read: its own values, the files it is based on, and what was wrong in it."""

    path: Path
    body: Branch
    bases: list[Leaf] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def plain_of(node: Node) -> Any:
    """The node as dicts, lists and scalars."""
    if isinstance(node, Branch):
        return {name: plain_of(below) for name, below in node.entries.items()}
    return [plain_of(item) for item in node.items] if isinstance(node, Items) else node.value


# --- scalars -----------------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.?(inf|Inf|INF|nan|NaN|NAN)")
_NAMED = {word: value for name, value in (("true", True), ("false", False), ("null", None))
          for word in (name, name.capitalize(), name.upper())} | {"": None, "~": None, "None": None}  # fmt: skip
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)(?::-([^}]*))?\}|(\{))")


def scalar(text: str) -> Any:
    """The value of an unquoted word. Raises ValueError for a number too large to be one."""
    if text in _NAMED:
        return _NAMED[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if match := _SPECIAL.fullmatch(text):
        return float(match[1] + match[2])
    if not _NUMBER.fullmatch(text):
        return text
    if not math.isfinite(float(text)):
        raise ValueError(f"{shorten(text)} is too large for a number; write .inf for infinity")
    return float(text)


def leaf(text: str, plain: bool, origin: Origin) -> Leaf:
    """A scalar from its text: `${VAR}` filled in, then read as a number or word unless it was quoted."""
    try:
        text = _VARIABLE.sub(_variable, text)
        return Leaf(scalar(text) if plain else text, text, plain, origin)
    except ValueError as error:
        return Leaf(text, text, plain, origin, str(error))


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
_PLAIN = "plain"


class _Loader(yaml.SafeLoader):
    """Only composes nodes, and marks unquoted untagged words: `scalar` reads those, not YAML 1.1's rules."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _PLAIN
        return super().resolve(kind, value, implicit)


def read_file(path: Path) -> File:
    """Read one YAML file, without what it is based on. Raises `ConfigError` when it is no readable YAML mapping."""
    name = place(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _fatal("a file cannot be read", str(error.strerror), Origin(name)) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _fatal("the file is not UTF-8 text", "save it as UTF-8", Origin(name, line)) from error
    problems: list[Problem] = []
    body = read_text(text, Origin(name, 1), problems) or Branch({}, Origin(name, 1))
    if not isinstance(body, Branch):
        raise _fatal("the top of the file must be a mapping of keys to values", 'write "key: value"', body.origin)
    base = body.entries.pop("$BASE", None)
    bases = base.items if isinstance(base, Items) else [base] if base is not None else []
    for item in bases:
        if not (isinstance(item, Leaf) and isinstance(item.value, str)) or item.problem:
            rule = getattr(item, "problem", "") or "must be a path or a list of paths"
            problems.append(Problem("$BASE", plain_of(item), rule, origin=item.origin))
    good = [item for item in bases if isinstance(item, Leaf) and isinstance(item.value, str) and not item.problem]
    return File(path, body, good, problems)


def read_text(text: str, start: Origin, problems: list[Problem]) -> Node | None:
    """YAML text as a node; None when there is nothing in it. Small mistakes go to `problems`, others raise.

    `start`: where the text begins; without a line (the command line), every node gets `start` itself as its origin.
    """
    try:
        root = yaml.compose(text, _Loader)
        return None if root is None else _Reader(start, problems).read(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        tab = mark is not None and text[mark.index : mark.index + 1] == "\t"
        said = ", ".join(filter(None, (error.context, error.problem)))
        hint = "a tab stands here; YAML wants spaces" if tab else said
        raise _fatal("this is not readable as YAML", hint, _at(start, mark.line if mark else 0)) from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n")
        raise _fatal("a control character stands here", "remove it", _at(start, line)) from error
    except RecursionError as error:
        raise _fatal("this is nested too deeply to be read", "flatten it", start) from error


def _fatal(rule: str, hint: str, origin: Origin) -> ConfigError:
    return ConfigError([Problem("", ABSENT, rule, hint, origin)])


def _at(start: Origin, line: int) -> Origin:
    return start if start.line is None else Origin(start.source, start.line + line)


class _Reader:
    """Turns composed YAML nodes into ours; keeps a count, since aliases can unfold without end."""

    def __init__(self, start: Origin, problems: list[Problem]):
        self.start, self.problems = start, problems
        self.count = 0
        self.open: set[int] = set()

    def read(self, node: yaml.Node) -> Node:
        origin = _at(self.start, node.start_mark.line)
        self.count += 1
        if self.count > MOST_VALUES or id(node) in self.open:
            raise _fatal("the aliases of this file unfold without end", "write the values out", origin)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, origin)
        self._expect(node, {f"{_TAG}seq", f"{_TAG}map"}, origin)
        self.open.add(id(node))
        made: Node
        if isinstance(node, yaml.MappingNode):
            made = self._mapping(node, origin)
        else:
            made = Items([self.read(item) for item in node.value], origin)
        self.open.remove(id(node))
        return made

    def _expect(self, node: yaml.Node, tags: set[str], origin: Origin) -> None:
        if node.tag not in tags:
            shown = node.tag.replace(_TAG, "!!")
            self.problems.append(Problem("", ABSENT, f"the tag {shown} is not allowed", "plain values only", origin))

    def _scalar(self, node: yaml.ScalarNode, origin: Origin) -> Leaf:
        self._expect(node, {_PLAIN, *(_TAG + name for name in ("str", "int", "float", "bool", "null"))}, origin)
        return leaf(node.value, node.tag != f"{_TAG}str", origin)

    def _mapping(self, node: yaml.MappingNode, origin: Origin) -> Branch:
        branch, merged = Branch({}, origin), dict[str, Node]()
        lines: dict[str, Origin] = {}
        for key_node, value_node in node.value:
            at = _at(self.start, key_node.start_mark.line)
            if key_node.tag == _PLAIN and key_node.value == "<<":
                merged = self._merged(self.read(value_node)) | merged
                continue
            name = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if name is None or (key_node.tag == _PLAIN and not isinstance(_word(name), str)):
                rule, hint = "a key must be text", "put it in quotes"
                self.problems.append(Problem(name or "(a list or mapping)", ABSENT, rule, hint, at))
            elif name in lines:
                self.problems.append(Problem(name, ABSENT, f"the key stands twice, first at {lines[name]}", origin=at))
            elif name == "$REPLACE":
                branch.replace = self._flag(self.read(value_node))
            else:
                lines[name] = at
                branch.entries[name] = self.read(value_node)
                branch.entries[name].origin = at  # the key's line: where a person looks
        branch.entries = merged | branch.entries
        return branch

    def _flag(self, node: Node) -> bool:
        value = plain_of(node)
        if not isinstance(value, bool):
            self.problems.append(Problem("$REPLACE", value, "must be true or false", origin=node.origin))
        return value is True

    def _merged(self, node: Node) -> dict[str, Node]:
        """The entries behind `<<: *name`; of a list of names the first wins."""
        found: dict[str, Node] = {}
        for item in node.items if isinstance(node, Items) else [node]:
            if not isinstance(item, Branch):
                self.problems.append(Problem("<<", plain_of(item), "must name a mapping", origin=item.origin))
            else:
                found = item.entries | found
        return found


def _word(text: str) -> Any:
    try:
        return scalar(text)
    except ValueError:
        return None
