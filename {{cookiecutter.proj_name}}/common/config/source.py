"""YAML text -> nodes that record where each value was written; and values -> YAML text.

Numbers and words are not read by YAML 1.1's rules: `1e-5` is a number, `no`, `007` and `12:30:00` are text.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from common.config.problem import ABSENT, ConfigError, Problem, shown_path


@dataclass(frozen=True)
class Node:
    """One value as it was written.

    Attributes:
        value: a list of nodes, a dict of nodes, text in which variables and words are not read yet, or another value.
        origin: where it was written.
        quoted: whether text stays text, and is not read as a number or word.
        replace: whether this mapping contains `$REPLACE: true`.
        problem: why the value is invalid, or "". An error only if the value is used in the end.
        size: how many values it stands for, those of an alias each time.
    """

    value: Any
    origin: str
    quoted: bool = False
    replace: bool = False
    problem: str = ""
    size: int = 1


def node_of(value: Any, origin: str) -> Node:
    """Return plain data as nodes, all with the same origin."""
    if isinstance(value, dict):
        return Node({name: node_of(item, origin) for name, item in value.items()}, origin)
    if isinstance(value, (list, tuple)):
        return Node([node_of(item, origin) for item in value], origin)
    return Node(_escape(value), origin, quoted=True)


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


def scalar(text: str) -> Any:
    """Return the value of an unquoted word."""
    if text in _NAMED:
        return _NAMED[text]
    if not _NUMBER.fullmatch(text):
        return text
    if text.lstrip("+-").isdecimal():
        return int(text)
    return float(text.lower().replace(".i", "i").replace(".n", "n"))


# --- files -------------------------------------------------------------------------------------------------------

_LARGEST = 100_000  # values more than letters: thirty lines of aliases can stand for 10^9, which would take minutes
_MERGE, _PLAIN = "tag:yaml.org,2002:merge", "unquoted"


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, but it builds `Node`s, and reads unquoted words with `scalar`, not by YAML 1.1's rules.

    `origin_at` names the origin of a line of the text, counted from 0.
    """

    def __init__(self, text: str, origin_at: Callable[[int], str]) -> None:
        super().__init__(text)
        self.origin_at = origin_at
        self.largest = _LARGEST + len(text)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _MERGE if value == "<<" else _PLAIN
        return super().resolve(kind, value, implicit)

    def _origin(self, node: yaml.Node) -> str:
        return self.origin_at(node.start_mark.line)

    def _scalar(self, node: yaml.ScalarNode) -> Node:
        return Node(node.value, self._origin(node), node.tag != _PLAIN)

    def _sequence(self, node: yaml.SequenceNode) -> Node:
        items = [self.construct_object(item, deep=True) for item in node.value]
        size = self._checked(sum(item.size for item in items), node)
        return Node(items, self._origin(node), size=size)

    def _mapping(self, node: yaml.MappingNode) -> Node:
        origins: dict[Any, list[str]] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a string; quote it", problem_mark=key.start_mark)
            origins.setdefault(key.value, []).append(self._origin(key))
        self.flatten_mapping(node)  # `<<: *name`: the entries merged in come first, so the mapping's own win
        size = self._checked(len(node.value), node)
        entries = {}
        for key, item in node.value:
            value = self.construct_object(item, deep=True)
            problem = value.problem
            places = origins.get(key.value, [])
            if len(places) > 1:
                problem = f"this key is given twice, at {' and '.join(places)}"
            entries[key.value] = replace(value, origin=self._origin(key), problem=problem)  # the key's line
            size = self._checked(size + value.size, node)
        flag = str(entries.pop("$REPLACE", Node("false", "")).value).lower()
        if flag not in ("true", "false"):
            raise yaml.MarkedYAMLError(problem="$REPLACE must be true or false", problem_mark=node.start_mark)
        return Node(entries, self._origin(node), replace=flag == "true", size=size)

    def _checked(self, size: int, node: yaml.Node) -> int:
        if size > self.largest:
            rule = f"this stands for more than {_LARGEST:,} values; use fewer aliases (*name)"
            raise _error(rule, self._origin(node))
        return size


_Loader.yaml_constructors = {  # any other tag is an error
    _PLAIN: _Loader._scalar, "tag:yaml.org,2002:str": _Loader._scalar, "tag:yaml.org,2002:seq": _Loader._sequence,
    "tag:yaml.org,2002:map": _Loader._mapping, None: _Loader.construct_undefined,
}  # fmt: skip


def read_file(path: Path) -> Node:
    """Read one YAML file, without its bases. Raises `ConfigError` if it is not a readable YAML mapping."""
    name = shown_path(path)

    def origin_at(line: int) -> str:
        return f"{name}:{line + 1}"

    text = path.read_text("utf-8-sig", errors="surrogateescape")  # other bytes become what YAML refuses
    body = read_text(text, origin_at) or Node({}, origin_at(0))
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
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = 0
        if error.problem_mark is not None:
            line = error.problem_mark.line
        cause = f"{error.context or ''} {error.problem}".strip()
        raise _error(f"invalid YAML: {cause}", origin_at(line)) from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n")
        raise _error("the file is not UTF-8 text, or contains a control character", origin_at(line)) from error


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


_Dumper.add_representer(str, _text)


def dump(values: Any, flow: bool = False) -> str:
    """YAML text that loads back to equal values. `flow`: on one line."""
    text = yaml.dump(
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
