"""The command line: `--a.b value`, `--a.b=value` and `--a.b` (true) become the last layer of the configuration."""

import os
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

from common.base.text import is_utf8
from common.config.layers import merge
from common.config.problem import ABSENT, ConfigError, Problem
from common.config.schema import admits, child, only_text
from common.config.source import Node, read_text, scalar_node

SWITCHES = ("--help", "--print-config", "--debug")  # reserved options that take no value
_OTHER_NAMES = {"--configs": "--config", "-c": "--config", "-h": "--help"}
_VALUE = re.compile(r"[^-]|-\.?([0-9]|inf\b)|$", re.DOTALL)


class Option(NamedTuple):
    """One option as typed. `value` is None when none followed it."""

    value: str | None
    origin: str


def read_options(words: Sequence[str]) -> tuple[dict[str, Option], list[Problem]]:
    """Split a command line into options by name. A word that starts with a dash is a value only when it is a number.

    Raises `ConfigError` for a word that is not UTF-8.
    """
    foreign = [os.fsencode(word).decode(errors="backslashreplace") for word in words if not is_utf8(word)]
    if foreign:
        hint = "rename the file or folder, or set the terminal to UTF-8"
        raise ConfigError([Problem("", ABSENT, f"{word} is not UTF-8", hint, "command line") for word in foreign])
    options: dict[str, Option] = {}
    problems: list[Problem] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        typed, equals, value = word.partition("=")
        name = _OTHER_NAMES.get(typed, typed)
        origin = f"command line: {word}"
        if not name.startswith("--"):
            hint = f"did you mean --{word}?" if equals else "write --key value, and lists as 1,2,3 or '[1, 2, 3]'"
            problems.append(Problem("", ABSENT, f"unexpected argument {word!r}", hint, origin))
            continue
        option = Option(value if equals else None, origin)
        if not equals and name not in SWITCHES and rest and (rest[0] == "-" or _VALUE.match(rest[0])):
            option = Option(rest[0], f"{origin} {rest.pop(0)}")
        if equals and name in SWITCHES:
            problems.append(Problem(name, value, "takes no value", origin=origin))
        if name in options:
            problems.append(Problem(name, ABSENT, "is given more than once", "keep one", option.origin))
        options.setdefault(name, option)
    return options, problems


def option_value(argv: Sequence[str], option: str) -> str | None:
    """Return the value of `--option value` or `--option=value`; None where it is not given."""
    given = read_options(argv)[0].get(option)
    return given.value if given else None


def layer_of(options: Mapping[str, Option], schema: type, tree: Node) -> Node:
    """Return the options as a tree to lay over `tree`, the merged files. Names that contain dots are found there."""
    layer = Node({}, "command line")
    for name, option in options.items():
        parts = _split(name.removeprefix("--"), tree)
        node = _value(name, option, reduce(child, parts, schema))
        for part in reversed(parts):
            node = Node({part: node}, option.origin)
        layer = merge(layer, node, schema)
    return layer


def _split(key: str, tree: Node) -> list[str]:
    """Split a dotted key. A name that itself contains dots (an import path) is recognized if the files contain it."""
    words, parts, known = key.split("."), list[str](), tree.value
    while words:
        take = next((n for n in range(len(words), 0, -1) if ".".join(words[:n]) in known), 1)
        parts.append(".".join(words[:take]))
        below = known[parts[-1]].value if parts[-1] in known else {}
        known = below if isinstance(below, dict) else {}
        words = words[take:]
    return parts


def _value(name: str, option: Option, annotation: Any) -> Node:
    """Parse an option's value for a field of this type.

    Text fields take it as is. Only a value that starts like a flow list, flow mapping or quote is parsed as YAML, so
    `*.png` and `a: b` need no second pair of quotes inside the shell's.
    """
    text, origin = option
    as_text = only_text(annotation)
    if text is None:
        hint = f"needs a value; write a value that starts with a dash as {name}=-x"
        return Node(True, origin, problem="" if admits(annotation, bool, Any) else hint)
    if text.strip().startswith(("'", '"') if as_text else ("'", '"', "[", "{")):
        try:
            return read_text(text, lambda line: origin) or Node(None, origin)
        except ConfigError as error:
            rule = error.problems[0].rule
            if rule.startswith("invalid YAML"):
                rule = "is not valid YAML; put the whole value in quotes, or the shell will split it"
            return Node(text, origin, problem="" if as_text else rule)
    null = text in ("null", "None", "~", "") and admits(annotation, type(None))
    return scalar_node(text, as_text and not null, origin)
