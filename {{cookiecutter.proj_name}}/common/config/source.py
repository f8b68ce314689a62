"""YAML text -> nodes that record where each value was written; and values -> YAML text.

Numbers and words are read as in YAML 1.2, not 1.1: `1e-5` is a number, `no`, `007` and `12:30:00` are text.
Environment variables are expanded here.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from common.config.problem import ABSENT, ConfigError, Problem, join, shown_path
from common.config.schema import admits, items_of


@dataclass(frozen=True)
class Node:
    """One value as it was written.

    Attributes:
        value: a scalar, a list of nodes, or a dict of nodes.
        origin: where it was written.
        text: an unquoted scalar as written, which a text field uses; None for all other values.
        replace: whether this mapping contains `$REPLACE: true`.
        problem: why the value is invalid, or "". An error only if the value is used in the end.
        refers: whether `value` is text with references to other keys, not yet resolved.
    """

    value: Any
    origin: str
    text: str | None = None
    replace: bool = False
    problem: str = ""
    refers: bool = False


def by_key(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    """Yield a node and all that it contains, by dotted key."""
    yield key, node
    for part, inner in items_of(node.value):
        yield from by_key(inner, join(key, part))


def plain(node: Node) -> Any:
    """Return a node as plain data."""
    value = node.value
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


# --- scalars -----------------------------------------------------------------------------------------------------

_NUMBER = re.compile(
    r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.?(inf|Inf|INF)|\.?(nan|NaN|NAN)"
)
_NAMED = {
    "true": True, "True": True, "TRUE": True,
    "false": False, "False": False, "FALSE": False,
    "null": None, "Null": None, "NULL": None,
    "None": None, "~": None, "": None,
}  # fmt: skip
# $$, ${env:NAME}, ${env:NAME:-default}, ${section.key}, or the beginning of something else
_VARIABLE = re.compile(r"\$(?:(\$)|\{env:([A-Za-z_]\w*)(?::-([^}]*))?\}|\{([^\s${}:]+)\}|\{)")


def scalar(text: str) -> Any:
    """Return the value of an unquoted word."""
    if text in _NAMED:
        return _NAMED[text]
    if not _NUMBER.fullmatch(text):
        return text
    if text.lstrip("+-").isdecimal():
        return int(text)
    return float(text.lower().replace(".i", "i").replace(".n", "n"))


def list_items(text: str, annotation: Any) -> list[str]:
    """Return the items of text like `0,1,2` where a list is expected and no text; else none."""
    if "," not in text or not admits(annotation, list) or admits(annotation, str, Any):
        return []
    return [item.strip() for item in text.removesuffix(",").split(",")]


def scalar_node(text: str, quoted: bool, origin: str) -> Node:
    """Return a scalar from its text: `${env:NAME}` expanded, then read as a number or word unless it was quoted.

    Text with references is kept as it is, for `references`.
    """
    try:
        text = _VARIABLE.sub(_expand, text)
    except ValueError as error:
        return Node(text, origin, problem=str(error))
    if references_in(text):
        return Node(text, origin, refers=True)
    text = fill_in(text, {})
    if quoted:
        return Node(text, origin)
    return Node(scalar(text), origin, text)


def references_in(text: str) -> list[str]:
    """Return the keys that `text` refers to, as in `${model.width}`."""
    return [match[4] for match in _VARIABLE.finditer(text) if match[4]]


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """`text` with every reference replaced by the value of its key, and `$$` by a dollar."""

    def value_of(match: re.Match[str]) -> str:
        if match[4]:
            return values[match[4]]
        return "$"

    return _VARIABLE.sub(value_of, text)


def _expand(match: re.Match[str]) -> str:
    """Expand the value of an environment variable, its dollars doubled; other matches unchanged."""
    dollar, name, default, key = match.groups()
    if dollar or key:
        return match[0]
    if not name:
        raise ValueError("write ${section.key}, ${env:NAME}, ${env:NAME:-default}, or $$ for a dollar")
    value = os.environ.get(name)
    if value is not None and value != os.fsencode(value).decode(errors="replace"):
        raise ValueError(f"the environment variable {name} is not UTF-8")
    if default is not None:
        value = value or default  # as in a shell, `:-` also replaces an empty variable
    if value is None:
        raise ValueError(f"the environment variable {name} is not set; set it, or write ${{env:{name}:-default}}")
    return value.replace("$", "$$")


# --- files -------------------------------------------------------------------------------------------------------

MOST_COPIED = 20_000  # values that aliases, or references, add
_MERGE, _PLAIN = "tag:yaml.org,2002:merge", "unquoted"


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, but builds `Node`s, and reads unquoted words with `scalar`, not by YAML 1.1's rules.

    `origin_at` names the origin of a line of the text, counted from 0.
    """

    def __init__(self, text: str, origin_at: Callable[[int], str]) -> None:
        super().__init__(text)
        self.origin_at = origin_at

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _MERGE if value == "<<" else _PLAIN
        return super().resolve(kind, value, implicit)

    def _origin(self, node: yaml.Node) -> str:
        return self.origin_at(node.start_mark.line)

    def _scalar(self, node: yaml.ScalarNode) -> Node:
        return scalar_node(node.value, node.tag != _PLAIN, self._origin(node))

    def _sequence(self, node: yaml.SequenceNode) -> Node:
        items = [self.construct_object(item, deep=True) for item in node.value]
        return Node(items, self._origin(node))

    def _mapping(self, node: yaml.MappingNode) -> Node:
        origins: dict[Any, list[str]] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a string; quote it", problem_mark=key.start_mark)
            origins.setdefault(key.value, []).append(self._origin(key))
        self.flatten_mapping(node)  # `<<: *name`: the entries merged in come first, so the mapping's own win
        entries: dict[str, Node] = {}
        for key, item in node.value:
            value = self.construct_object(item, deep=True)
            problem = value.problem
            places = origins.get(key.value, [])
            if len(places) > 1:
                problem = f"this key is given twice, at {' and '.join(places)}"
            entries[key.value] = replace(value, origin=self._origin(key), problem=problem)  # the key's line
        flag = entries.pop("$REPLACE", Node(False, "")).value
        if not isinstance(flag, bool):
            raise yaml.MarkedYAMLError(problem="$REPLACE must be true or false", problem_mark=node.start_mark)
        return Node(entries, self._origin(node), replace=flag)


_Loader.yaml_constructors = {  # any other tag is an error
    _PLAIN: _Loader._scalar, "tag:yaml.org,2002:str": _Loader._scalar, "tag:yaml.org,2002:seq": _Loader._sequence,
    "tag:yaml.org,2002:map": _Loader._mapping, None: _Loader.construct_undefined,
}  # fmt: skip


def read_file(path: Path) -> Node:
    """Read one YAML file, without its bases. Raises `ConfigError` if it is not a readable YAML mapping."""
    name = shown_path(path)

    def origin_at(line: int) -> str:
        return f"{name}:{line + 1}"

    try:
        body = read_text(path.read_text("utf-8-sig"), origin_at) or Node({}, origin_at(0))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n")
        raise _error("the file is not UTF-8 text", origin_at(line)) from error
    if not isinstance(body.value, dict):
        raise _error('the top level of the file must be a mapping: "key: value"', body.origin)
    return body


def read_text(text: str, origin_at: Callable[[int], str]) -> Node | None:
    """YAML text as a node; None if it is empty. `origin_at`: as in `_Loader`. Raises `ConfigError`."""
    try:
        loader = _Loader(text, origin_at)
        root = loader.get_single_node()
        if root is None:
            return None
        _count(root, {}, origin_at)
        node: Node = loader.construct_document(root)
        return node
    except yaml.MarkedYAMLError as error:
        line = 0
        if error.problem_mark is not None:
            line = error.problem_mark.line
        cause = f"{error.context or ''} {error.problem}".strip()
        raise _error(f"invalid YAML: {cause}", origin_at(line)) from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n")
        raise _error("the file contains a control character", origin_at(line)) from error


def _count(node: yaml.Node, counts: dict[int, int], origin_at: Callable[[int], str]) -> int:
    """Count the values that a node stands for, each alias anew. `counts`: the numbers of earlier nodes.

    Raises `ConfigError` if aliases add too many: thirty lines can stand for 10^9 values, which would take minutes.
    """
    if id(node) in counts:
        return counts[id(node)]
    counts[id(node)] = 0  # an alias inside its own anchor, which the construction refuses
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            parts += [key, value]
    total = 1
    for part in parts:
        total += _count(part, counts, origin_at)
    counts[id(node)] = total
    if total > len(counts) + MOST_COPIED:
        rule = f"aliases (*name) must not add more than {MOST_COPIED:,} values, and these stand for {total:,}"
        raise _error(rule, origin_at(node.start_mark.line))
    return total


def _error(rule: str, origin: str) -> ConfigError:
    return ConfigError([Problem("", ABSENT, rule, origin=origin)])


# --- writing --------------------------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either this project's reader or a YAML 1.1 reader would read as another value."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"'
    if scalar(text) == text and text.isprintable() and text != "<<":
        style = ""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    is_nested = any(isinstance(item, (dict, list)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=not is_nested or None)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def dump(values: Any, flow: bool = False) -> str:
    """YAML text that loads back to equal values. `flow`: on one line."""
    text: str = yaml.dump(
        _escape(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf, default_flow_style=flow
    )
    if flow:
        return text.removesuffix("\n").removesuffix("\n...")
    return text


def _escape(values: Any) -> Any:
    """`values` with each dollar doubled, since `${key}` would be read as a reference; not in keys."""
    if isinstance(values, dict):
        return {name: _escape(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_escape(value) for value in values]
    if isinstance(values, str):
        return values.replace("$", "$$")
    return values
