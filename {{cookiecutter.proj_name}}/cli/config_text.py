"""A config as text for people: `--help`, `--print-config`, and the lines of configs/default.yaml."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any

from common.config import ABSENT, dump
from common.config.problem import join, origin_of
from common.config.schema import Key, section_of, walk

WIDTH = 120
_COLUMN = 36  # where comments begin


def with_origins(values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Write YAML with the origin of every value as a comment; it can be loaded like the text of `dump`."""
    lines = []
    for key, line, is_section in yaml_rows(values):
        if not is_section:
            origin = (origins.get(key) or origin_of(key, origins)).replace("\n", " ")
            line = f"{line:<{_COLUMN}}  # {origin}"
        lines.append(line)
    return "\n".join(lines)


_USAGE = """usage: {prog} --config FILE [--key value ...]

Options:
  --config FILE                     # the configuration, also --configs, -c; default: {default}
  --print-config                    # print every value and its origin, and stop
  --list [KIND]                     # print what is registered, such as models, with file:line and arguments, and stop
  --debug                           # apply the debug settings on top of the configuration
  --help, -h                        # print this, and stop

Any key below may be given as --key value or --key=value, or nested in the file:
  {prog} --config FILE --name second_try --print-config
  {prog} --config FILE --a.list 0,1,2 --a.text=-x --a.switch
  {prog} --config FILE --a.section null --b.section '{{key: value}}'
"""


def help_text(schema: type, prog: str, default: str) -> str:
    """List the options, and every key with its default and its meaning, wrapped at `WIDTH` columns."""
    lines = [_USAGE.format(prog=prog, default=default)]
    for dotted, key in walk(schema):
        meaning = describe(dotted, key)
        if section_of(key.annotation) is not None:
            lines += ["", *textwrap.wrap(f"{dotted}: {meaning}", WIDTH)]
            continue
        value = "(required)"
        if key.default is not ABSENT:
            value = dump(key.default, flow=True)
        lines += with_comment(f"  --{dotted}  {value}", meaning)
    return "\n".join(lines)


def describe(dotted: str, key: Key) -> str:
    """Return the docstring below a field, or the first paragraph of a section's docstring."""
    text = meanings(key.section).get(dotted.rpartition(".")[2], "")
    section = section_of(key.annotation)
    if not text and section is not None:
        text = (section.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split())


@cache
def meanings(schema: type) -> dict[str, str]:
    """Return the docstrings below the fields of a section and of its bases, by field."""
    found = {}
    for base in reversed(schema.__mro__):
        with suppress(OSError, TypeError, SyntaxError):  # a class without source, or within a function
            tree: Any = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            for pair in pairwise(tree.body):
                match pair:
                    case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        found[name] = text.strip()
    return found


def yaml_rows(values: Mapping[str, Any], above: str = "", indent: str = "") -> Iterator[tuple[str, str, bool]]:
    """Yield the lines of YAML text with their dotted key, and whether the value follows in the next lines."""
    for name, value in values.items():
        key = join(above, name)
        label = indent + dump(name, flow=True).replace("$$", "$")  # in a key, a dollar is only a dollar
        if isinstance(value, dict) and value:
            yield key, f"{label}:", True
            yield from yaml_rows(value, key, f"{indent}  ")
        else:
            yield key, f"{label}: {dump(value, flow=True)}", False


def with_comment(line: str, meaning: str) -> list[str]:
    """Append a comment to a line; a long comment continues below, and one on a long line begins there."""
    comment = [f"{'':<{_COLUMN}}# {text}" for text in textwrap.wrap(meaning, WIDTH - _COLUMN - 2)]
    if not comment or len(line) > _COLUMN - 2:
        return [line, *comment]
    comment[0] = line + comment[0][len(line) :]
    return comment
