"""All keys, documented for people: the default config as a commented file, and `--help`."""

import shutil
import textwrap
from typing import Any

from pydantic_core import to_jsonable_python

from common.config.problem import ABSENT
from common.config.schema import choices_of, section_of, walk
from common.config.show import dump, rows

_WIDTH = 120
_COLUMN = 36  # where comments begin


def commented_yaml(schema: type, defaults: Any, header: str) -> str:
    """YAML of `defaults`, an instance of the section `schema`, with each key's description as a comment."""
    lines = [*(f"# {line}" for line in header.splitlines()), ""]
    keys = dict(walk(schema))
    for dotted, line, is_section in rows(to_jsonable_python(defaults)):
        meaning = keys[dotted].meaning if dotted in keys else ""
        if not is_section:
            lines += _beside(line, meaning)
            continue
        pad = line[: len(line) - len(line.lstrip())]
        lines += [] if pad else [""]
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _beside(line: str, meaning: str, width: int = _WIDTH) -> list[str]:
    """The line with its comment to the right, continued below when it is long."""
    first, *more = textwrap.wrap(meaning, width - _COLUMN - 2) or [""]
    below = [f"{'':<{_COLUMN}}# {text}" for text in more]
    return [f"{line:<{_COLUMN - 2}}  # {first}".removesuffix("  # ").rstrip(), *below]


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
        "--debug": "apply the debug settings on top of the configuration",
        "--help, -h": "print this, and stop",
    }
    about = " ".join((description or schema.__doc__ or "").split())
    lines = [f"usage: {prog} --config FILE [--key value ...]", "", *textwrap.wrap(about, width), "", "Options:"]
    for option, meaning in options.items():
        lines += _beside(f"  {option}", meaning, width)
    lines += [*_EXAMPLES.format(prog=prog).splitlines(), ""]
    for dotted, key in walk(schema):
        if section_of(key.annotation):
            lines += ["", *textwrap.wrap(f"{dotted}: {key.meaning}", width)]
            continue
        value = "(required)" if key.default is ABSENT else dump(to_jsonable_python(key.default), flow=True)
        choices = f" ({' | '.join(choices_of(key.annotation))})" if choices_of(key.annotation) else ""
        line = f"  --{dotted}  {value}"
        beside = len(line) < _COLUMN - 1
        lines += [*([] if beside else [line]), *_beside(line if beside else "", key.meaning + choices, width)]
    return "\n".join(lines)
