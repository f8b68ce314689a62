"""The command line: `--a.b value`, `--a.b=value` and `--a.b` (true) become the last layer of the configuration."""

import re
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

from common.config.layers import merge
from common.config.problem import ABSENT, ConfigError, Problem
from common.config.schema import admits, child, only_text
from common.config.source import Node, read_text

SWITCHES = ("--help", "--print-config", "--debug")  # reserved options that take no value
_OTHER_NAMES = {"--configs": "--config", "-c": "--config", "-h": "--help"}
_VALUE = re.compile(r"[^-]|-\.?([0-9]|inf\b)|-?$", re.DOTALL)


class Option(NamedTuple):
    """One option as typed. `value` is None when none followed it."""

    value: str | None
    origin: str


def read_options(words: Sequence[str]) -> tuple[dict[str, Option], list[Problem]]:
    """Split a command line into options by name. A word that starts with a dash is a value only when it is a number."""
    options: dict[str, Option] = {}
    problems = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        typed, equals, value = word.partition("=")
        name = _OTHER_NAMES.get(typed, typed)
        origin = f"command line: {word}"
        if not name.startswith("--") or (equals and name in SWITCHES):
            hint = "write --key value, and lists as 1,2,3 or '[1, 2, 3]'"
            problems.append(Problem("", ABSENT, f"unexpected argument {word!r}", hint, origin))
            continue
        option = Option(None, origin)
        if equals:
            option = Option(value, origin)
        elif name not in SWITCHES and rest and _VALUE.match(rest[0]):
            value = rest.pop(0)
            option = Option(value, f"{origin} {value}")
        if name in options:
            problems.append(Problem(name, ABSENT, "is given more than once", "keep one", option.origin))
        options.setdefault(name, option)
    return options, problems


def option_value(argv: Sequence[str], option: str) -> str | None:
    """Return the value of `--option value` or `--option=value`; None where it is not given."""
    given = read_options(argv)[0].get(option)
    if given is None:
        return None
    return given.value


def lay_over(tree: Node, options: Mapping[str, Option], schema: type) -> Node:
    """Lay the options over a tree: a section before its keys, and its `type` before its other keys, as in a file."""
    for name in sorted(options, key=lambda name: (name.count("."), not name.endswith(".type"))):
        parts = name.removeprefix("--").split(".")
        option = options[name]
        node = _value(name, option, reduce(child, parts, schema))
        for part in reversed(parts):
            node = Node({part: node}, option.origin)
        tree = merge(tree, node, schema)
    return tree


def _value(name: str, option: Option, annotation: Any) -> Node:
    """Return an option's value as a field of this type takes it: as typed if only text fits.

    Only a value that starts like a flow list, flow mapping or quote is parsed as YAML, so `*.png` and `a: b` need no
    second pair of quotes inside the shell's.
    """
    text, origin = option
    if text is None:
        if admits(annotation, bool, Any):
            return Node(True, origin)
        return Node(ABSENT, origin, problem=f"needs a value; write a value that starts with a dash as {name}=-x")
    as_text = only_text(annotation)
    if text.startswith(("'", '"')) or (text.startswith(("[", "{")) and not as_text):
        try:
            return read_text(text, lambda line: origin) or Node(None, origin)
        except ConfigError as error:
            if not as_text:
                rule = error.problems[0].rule
                return Node(text, origin, problem=f"{rule}; put the whole value in quotes, or the shell will split it")
    return Node(text, origin, quoted=as_text and not admits(annotation, type(None)))
