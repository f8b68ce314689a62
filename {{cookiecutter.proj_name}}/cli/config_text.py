"""A config as text for people: `--help`, `--print-config`, and the lines of configs/default.yaml."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from common.config import ABSENT, dump
from common.config.problem import DEFAULT
from common.config.schema import members, metadata, section_of, walk

WIDTH = 120
_COLUMN = 36  # where comments begin


def with_origins(values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Write YAML with the origin of every value as a comment; it can be loaded like the text of `dump`."""
    lines = [(line, "" if is_section else origins.get(key, DEFAULT)) for key, line, is_section in yaml_rows(values)]
    width = min(max((len(line) for line, origin in lines if origin), default=0), 60)
    shown = [f"{line:<{width}}  # {' '.join(origin.splitlines())}" if origin else line for line, origin in lines]
    return "".join(f"{line}\n" for line in shown)


_EXAMPLES = """
Any key below may be given as --key value or --key=value, or nested in the file:
  {prog} --config FILE --name second_try --print-config
  {prog} --config FILE --a.list 0,1,2 --a.text=-x --a.switch
  {prog} --config FILE --a.section null --b.section '{{key: value}}'
"""


def help_text(
    schema: type, *, prog: str = "train.py", description: str = "", default: str = "", kinds: tuple[str, ...] = ()
) -> str:
    """List the options, and every key with its default and its meaning, wrapped to the width of the terminal."""
    width = min(shutil.get_terminal_size().columns, WIDTH)
    options = {
        "--config FILE": f"the configuration{f' (default {default})' * bool(default)}; also --configs FILE, -c FILE",
        "--print-config": "print every value and its origin, and exit",
        "--list [KIND]": f"print what is registered, with file:line and arguments, and stop; KIND: {', '.join(kinds)}",
        "--debug": "apply the debug settings on top of the configuration",
        "--help, -h": "print this, and stop",
    }
    about = " ".join((description or schema.__doc__ or "").split())
    lines = [f"usage: {prog} --config FILE [--key value ...]", "", *textwrap.wrap(about, width), "", "Options:"]
    for option, meaning in options.items():
        lines += with_comment(f"  {option}", meaning, width)
    lines += [*_EXAMPLES.format(prog=prog).splitlines(), ""]
    for dotted, key in walk(schema):
        meaning = describe(key.annotation)
        if section_of(key.annotation):
            lines += ["", *textwrap.wrap(f"{dotted}: {meaning}", width)]
            continue
        value = "(required)" if key.default is ABSENT else dump(key.default, flow=True)
        choices = f" ({' | '.join(_choices(key.annotation))})" if _choices(key.annotation) else ""
        line = f"  --{dotted}  {value}"
        beside = len(line) < _COLUMN - 1
        lines += [*([] if beside else [line]), *with_comment(line if beside else "", meaning + choices, width)]
    return "\n".join(lines)


def describe(annotation: Any) -> str:
    """Return the description of a field, or the first paragraph of a section's docstring."""
    described = (item.description for item in metadata(annotation) if isinstance(item, FieldInfo))
    text = " ".join(filter(None, described))
    if not text and (section := section_of(annotation)):
        text = (section.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split())


def _choices(annotation: Any) -> list[str]:
    """Return the choices of a field that accepts only fixed words (or null); [] for other fields."""
    kinds = [member for member in members(annotation) if member is not type(None)]
    if not all(get_origin(member) is Literal for member in kinds):
        return []
    return [str(value) for member in kinds for value in get_args(member)]


def yaml_rows(values: Mapping[str, Any], above: str = "", indent: str = "") -> Iterator[tuple[str, str, bool]]:
    """Yield the lines of YAML text with their dotted key, and whether the value follows in the next lines."""
    for name, value in values.items():
        key = f"{above}.{name}".removeprefix(".")
        label = indent + dump(name, flow=True).replace("$$", "$")  # in a key, a dollar is only a dollar
        is_section = isinstance(value, dict) and bool(value)
        yield key, f"{label}:" if is_section else f"{label}: {dump(value, flow=True)}", is_section
        if is_section:
            yield from yaml_rows(value, key, f"{indent}  ")


def with_comment(line: str, meaning: str, width: int = WIDTH) -> list[str]:
    """Append a comment to a line; a long one continues below."""
    first, *more = textwrap.wrap(meaning, width - _COLUMN - 2) or [""]
    below = [f"{'':<{_COLUMN}}# {text}" for text in more]
    return [f"{line:<{_COLUMN - 2}}  # {first}".removesuffix("  # ").rstrip(), *below]
