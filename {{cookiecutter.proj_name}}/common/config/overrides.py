"""The command line: `--a.b value`, `--a.b=value` and `--a.b` (true) become the last layer of the configuration."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from common.config.layers import merge
from common.config.problem import ABSENT, RESERVED, ConfigError, Origin, Problem
from common.config.schema import admits, child, only_text
from common.config.source import Node, read_text, scalar_node

SWITCHES = ("--help", "--print-config", "--debug")  # reserved options that take no value
_OTHER_NAMES = {"--configs": "--config", "-c": "--config", "-h": "--help"}
_NUMBER = re.compile(r"-(\.?[0-9]|\.?inf\b)")


@dataclass(frozen=True)
class Option:
    """One option as typed. `value` is None when none followed it."""

    name: str
    value: str | None
    words: str

    @property
    def origin(self) -> Origin:
        return Origin(f"command line: {self.words}")

    def problem(self, rule: str, hint: str = "") -> Problem:
        """What is wrong with this option."""
        key = self.name if self.name in RESERVED else self.name.removeprefix("--")
        return Problem(key, ABSENT if self.value is None else self.value, rule, hint, self.origin)


def read_options(words: Sequence[str]) -> tuple[dict[str, Option], list[Problem]]:
    """Split a command line into options by name. A word that starts with a dash is a value only when it is a number."""
    options: dict[str, Option] = {}
    problems: list[Problem] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = _OTHER_NAMES.get(name, name)
        if not name.startswith("--"):
            hint = f"did you mean --{word}?" if equals else "write --key value, and lists as 1,2,3 or '[1, 2, 3]'"
            problems.append(Problem("", ABSENT, f"{word!r} belongs to no option", hint, Origin("command line")))
            continue
        option = Option(name, value if equals else None, word)
        if not equals and name not in SWITCHES and rest and _is_value(rest[0]):
            option = Option(name, rest[0], f"{word} {rest.pop(0)}")
        if equals and name in SWITCHES:
            problems.append(option.problem("takes no value"))
        if name in options:
            problems.append(option.problem("is given more than once", "keep one"))
        else:
            options[name] = option
    return options, problems


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word == "-" or _NUMBER.match(word) is not None


def option_value(argv: Sequence[str], option: str) -> str | None:
    """The value of `--option value` or `--option=value`; None where it is not given."""
    found = read_options(argv)[0].get(option)
    return found.value if found else None


def layer_of(options: Sequence[Option], schema: type, tree: Node, problems: list[Problem]) -> Node:
    """The options as a tree to lay over `tree`, the merged files, which know the names that hold dots themselves."""
    layer = Node({}, Origin("command line"))
    for option in options:
        parts = _split(option.name.removeprefix("--"), tree)
        node = _value(option, reduce(child, parts, schema), problems)
        for part in reversed(parts):
            node = Node({part: node}, option.origin)
        layer = merge(layer, node, schema)
    return layer


def _split(key: str, tree: Node) -> list[str]:
    """A dotted key in its parts. A name that itself holds dots (an import path) is found where the files have it."""
    words, parts, known = key.split("."), list[str](), tree.value
    while words:
        take = next((n for n in range(len(words), 0, -1) if ".".join(words[:n]) in known), 1)
        parts.append(".".join(words[:take]))
        below = known[parts[-1]].value if parts[-1] in known else {}
        known, words = below if isinstance(below, dict) else {}, words[take:]
    return parts


def _value(option: Option, annotation: Any, problems: list[Problem]) -> Node:
    """The value typed after an option, read for a field of this type.

    Text fields take it as it stands. Only what opens like a flow list, flow mapping or quote is parsed as YAML, so
    that `*.png` and `a: b` need no second pair of quotes inside the shell's.
    """
    text, origin, as_text = option.value, option.origin, only_text(annotation)
    if text is None:
        hint = f"needs a value; one that starts with a dash is written {option.name}=-x"
        return Node(True, origin, problem="" if admits(annotation, bool, Any) else hint)
    if text.strip().startswith(("'", '"') if as_text else ("'", '"', "[", "{")):
        try:
            return read_text(text, origin, problems) or Node(None, origin)
        except ConfigError:
            hint = "" if as_text else "is not readable as YAML; put the whole value in quotes, or the shell splits it"
            return Node(text, origin, problem=hint)
    null = text in ("null", "None", "~", "") and admits(annotation, type(None))
    return scalar_node(text, as_text and not null, origin)
