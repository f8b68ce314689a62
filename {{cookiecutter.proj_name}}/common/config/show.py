"""A configuration for people and editors: saved YAML, each value with its origin, the help text, the JSON schema."""

import dataclasses
import math
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import TypeAdapter

from common.config.layers import data_of
from common.config.problem import DEFAULT, Origin
from common.config.shape import Key, describe, keys_of, section_of
from common.config.source import scalar

INDENT = "  "


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either this project's reader or a YAML 1.1 reader would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    try:
        safe = scalar(text) == text and text.isprintable() and text != "<<"
    except ValueError:
        safe = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if safe else '"')


def _list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    flat = not any(isinstance(item, (dict, list)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flat or None)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def dump(values: Any, flow: bool = False) -> str:
    """YAML text that loads back to equal values. `flow`: on one line."""
    return _write(_escaped(values), flow)


def _write(values: Any, flow: bool) -> str:
    text: str = yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf, default_flow_style=flow
    )
    return text.removesuffix("\n").removesuffix("\n...") if flow else text


def _escaped(values: Any) -> Any:
    """`values` with each dollar doubled, since `${NAME}` would be read as an environment variable; not in keys."""
    if isinstance(values, dict):
        return {name: _escaped(value) for name, value in values.items()}
    if isinstance(values, list):
        return [_escaped(value) for value in values]
    return values.replace("$", "$$") if isinstance(values, str) else values


def with_origins(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> str:
    """YAML text with the origin of each value as a comment; loads back like `dump`."""
    rows = list(_rows(values, origins, "", ""))
    width = min(max((len(line) for line, origin in rows if origin), default=0), 60)
    return "".join(f"{line:<{width}}  # {origin}\n" if origin else f"{line}\n" for line, origin in rows)


def _rows(values: Mapping[str, Any], origins: Mapping[str, Origin], key: str, indent: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        dotted = f"{key}.{name}".removeprefix(".")
        label = indent + _write(name, flow=True)
        if isinstance(value, dict) and value:
            yield f"{label}:", ""
            yield from _rows(value, origins, dotted, indent + INDENT)
        else:
            origin = str(origins.get(dotted, DEFAULT)).replace("\n", " ")
            yield f"{label}: {dump(value, flow=True)}", origin


OPTIONS = (
    ("--config FILE", "the configuration{default}; also --configs FILE, -c FILE"),
    ("--print-config", "print every value with the place it came from, and stop"),
    ("--list [KIND]", "print what is registered, with file:line and arguments, and stop{kinds}"),
    ("--debug", "lay the debug settings over the configuration"),
    ("--help, -h", "print this, and stop"),
)
EXAMPLES = """
Any key below may be given as --key value or --key=value, or nested in the file:
  {prog} --config FILE --name second_try --print-config
  {prog} --config FILE --a.list 0,1,2 --a.text=-x --a.switch
  {prog} --config FILE --a.section null --b.section '{{key: value}}'
"""


def help_text(
    schema: type, *, prog: str = "train.py", description: str = "", default: str = "", kinds: tuple[str, ...] = ()
) -> str:
    """Every key with type, default and meaning, by section, wrapped to the width of the terminal."""
    width = min(shutil.get_terminal_size().columns, 120)
    about = textwrap.fill(" ".join((description or schema.__doc__ or "").split()), width)
    default = f" (default {default})" if default else ""
    listed = f"; KIND: {', '.join(kinds)}" if kinds else ""
    lines = [f"usage: {prog} --config FILE [--key value ...]", "", about, "", "Options:"]
    for option, meaning in OPTIONS:
        meaning = meaning.format(default=default, kinds=listed)
        lines += _wrap(f"{option:<16}{meaning}", width, INDENT, INDENT * 9)
    return "\n".join([*lines, EXAMPLES.format(prog=prog), *_section_help(schema, "", width)])


def _section_help(schema: type, prefix: str, width: int) -> Iterator[str]:
    nested = [key for key in keys_of(schema).values() if section_of(key.annotation)]
    for key in keys_of(schema).values():
        if key not in nested:
            yield from _key_help(key, prefix, width)
    for key in nested:
        below = section_of(key.annotation)
        assert below is not None
        about = key.meaning or _own_doc(below)
        off = " (null: off)" if key.default is None else ""
        yield ""
        yield from _wrap(f"{prefix}{key.name}: {about}".removesuffix(": ") + off, width, "", INDENT)
        yield from _section_help(below, f"{prefix}{key.name}.", width)


def _own_doc(schema: type) -> str:
    """The first sentence of a section's docstring, not the signature that `dataclass` writes when there is none."""
    text = " ".join((schema.__doc__ or "").split())
    return "" if text.startswith(f"{schema.__name__}(") else text.partition(". ")[0].removesuffix(".")


def _key_help(key: Key, prefix: str, width: int) -> Iterator[str]:
    required = key.default is dataclasses.MISSING
    default = "required" if required else f"default {_short(data_of(key.default))}"
    yield from _wrap(f"--{prefix}{key.name}  {describe(key.annotation)} ({default})", width, INDENT, INDENT * 4)
    if key.meaning:
        yield from _wrap(key.meaning, width, INDENT * 4, INDENT * 4)


def _short(value: Any) -> str:
    text = dump(value, flow=True)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def _wrap(text: str, width: int, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def json_schema(schema: type) -> dict[str, Any]:
    """A JSON schema for editors. Nothing is required (a base may hold it); free sections allow any key."""
    found = _editable(TypeAdapter(schema).json_schema())
    paths = {"type": "string"}
    found["properties"]["$BASE"] = {"anyOf": [paths, {"type": "array", "items": paths}], "description": _BASE}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **found}


_BASE = "file or files this one is laid over, relative to this file"
_REPLACE = {"type": "boolean", "description": "true: replace the base's section instead of merging with it"}


def _editable(node: Any) -> Any:
    if isinstance(node, list):
        return [_editable(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {name: item for name, item in node.items() if not _is_noise(name, item)}
    if "properties" in kept:
        inner = {name: _editable(item) for name, item in kept.pop("properties").items()}
        kept = {name: _editable(item) for name, item in kept.items()}
        return {**kept, "properties": {**inner, "$REPLACE": _REPLACE}}
    return {name: item if name == "default" else _editable(item) for name, item in kept.items()}


def _is_noise(name: str, item: Any) -> bool:
    """Generated titles, `required`, and defaults that JSON cannot write."""
    infinite = name == "default" and isinstance(item, float) and not math.isfinite(item)
    return (name == "title" and isinstance(item, str)) or (name == "required" and isinstance(item, list)) or infinite
