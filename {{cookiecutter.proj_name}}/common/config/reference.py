"""The default config as a file to read: every key with its default and, beside it, its meaning."""

import textwrap
from typing import Any

from common.config.shape import keys_of, section_of
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
        meaning = key.meaning if section is None else (section.__doc__ or "").strip().split("\n\n")[0]
        lines += textwrap.wrap(
            " ".join(meaning.split()), _WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# "
        )
        lines.append(f"{pad}{name}:")
        if section is None:
            lines += textwrap.indent(dump(value).rstrip("\n"), f"{pad}  ").splitlines()
        else:
            _write(section, value, depth + 1, lines)


def _beside(line: str, meaning: str) -> list[str]:
    """The line with its comment to the right, going on below when it is long."""
    first, *more = textwrap.wrap(meaning, _WIDTH - _COLUMN - 2) or [""]
    return [f"{line:<{_COLUMN - 2}}  # {first}", *(f"{'':<{_COLUMN}}# {text}" for text in more)]
