"""Every key there is, for people and editors: the default config as a commented file, `--help`, the JSON schema."""

import math
import shutil
import textwrap
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from common.config.problem import ABSENT
from common.config.schema import choices_of, keys_of, section_of, walk
from common.config.show import dump

_WIDTH = 120
_COLUMN = 36  # where comments begin


def commented_yaml(schema: type, defaults: Any, header: str) -> str:
    """YAML of `defaults`, an instance of the section `schema`, with each key's description as a comment."""
    lines = [*(f"# {line}" for line in header.splitlines()), ""]
    _write(schema, defaults, 0, lines)
    return "\n".join(lines) + "\n"


def _write(schema: type, values: Any, depth: int, lines: list[str]) -> None:
    pad = "  " * depth
    for name, key in keys_of(schema).items():
        value, section = getattr(values, name), section_of(key.annotation)
        if section is None and not (isinstance(value, dict) and value):
            lines += _beside(pad + dump({name: value}).rstrip("\n"), key.meaning)
            continue
        if depth == 0:
            lines.append("")
        meaning = key.meaning if section is None else _summary(section)
        lines += textwrap.wrap(
            " ".join(meaning.split()), _WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# "
        )
        lines.append(f"{pad}{name}:")
        if section is None:
            lines += textwrap.indent(dump(value).rstrip("\n"), f"{pad}  ").splitlines()
        else:
            _write(section, value, depth + 1, lines)


def _beside(line: str, meaning: str, width: int = _WIDTH) -> list[str]:
    """The line with its comment to the right, continued below when it is long."""
    first, *more = textwrap.wrap(meaning, width - _COLUMN - 2) or [""]
    below = [f"{'':<{_COLUMN}}# {text}" for text in more]
    return [f"{line:<{_COLUMN - 2}}  # {first}".removesuffix("  # "), *below]


_EXAMPLES = """
Any key below may be given as --key value or --key=value, or nested in the file:
  {prog} --config FILE --name second_try --print-config
  {prog} --config FILE --a.list 0,1,2 --a.text=-x --a.switch
  {prog} --config FILE --a.section null --b.section '{{key: value}}'
"""


def help_text(
    schema: type, *, prog: str = "train.py", description: str = "", default: str = "", kinds: tuple[str, ...] = ()
) -> str:
    """The options, and every key with its default and its meaning, wrapped to the width of the terminal."""
    width = min(shutil.get_terminal_size().columns, _WIDTH)
    options = {
        "--config FILE": f"the configuration{f' (default {default})' * bool(default)}; also --configs FILE, -c FILE",
        "--print-config": "print every value with the place it came from, and stop",
        "--list [KIND]": f"print what is registered, with file:line and arguments, and stop; KIND: {', '.join(kinds)}",
        "--debug": "lay the debug settings over the configuration",
        "--help, -h": "print this, and stop",
    }
    about = " ".join((description or schema.__doc__ or "").split())
    lines = [f"usage: {prog} --config FILE [--key value ...]", "", *textwrap.wrap(about, width), "", "Options:"]
    for option, meaning in options.items():
        lines += _beside(f"  {option}", meaning, width)
    lines += [*_EXAMPLES.format(prog=prog).splitlines(), ""]
    for dotted, key in walk(schema):
        if section := section_of(key.annotation):
            lines += ["", *textwrap.wrap(f"{dotted}: {key.meaning or _summary(section)}", width)]
            continue
        value = "(required)" if key.default is ABSENT else dump(to_jsonable_python(key.default), flow=True)
        choices = f" ({' | '.join(choices_of(key.annotation))})" if choices_of(key.annotation) else ""
        line = f"  --{dotted}  {value}"
        beside = len(line) < _COLUMN - 1
        lines += [*([] if beside else [line]), *_beside(line if beside else "", key.meaning + choices, width)]
    return "\n".join(lines)


def _summary(section: type) -> str:
    """The first paragraph of a section's docstring."""
    return " ".join((section.__doc__ or "").partition("\n\n")[0].split())


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
