"""The command line: `--a.b value`, `--a.b=value` and `--a.b` (true) become the last layer of the configuration."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from common.config.layers import merge
from common.config.problem import ABSENT, ConfigError, Origin, Problem
from common.config.schema import admits, child, keys_of, nearest, only_text
from common.config.source import Node, plain_of, read_text, scalar_node

SWITCHES = ("--help", "-h", "--print-config", "--debug")  # reserved options that take no value
RESERVED = (*SWITCHES, "--config", "--configs", "-c", "--list")
_LAUNCHER = ("--local_rank", "--local-rank")  # some launchers add it; the rank comes from the environment
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
        if not word.startswith("--") and word not in RESERVED:
            hint = (
                f"did you mean --{word}?" if equals else "options are written --key value, lists 1,2,3 or '[1, 2, 3]'"
            )
            origin = Origin(f"command line: {word}")
            problems.append(Problem("", ABSENT, f"{word!r} belongs to no option", hint, origin))
            continue
        option = Option(name, value if equals else None, word)
        if not equals and name not in SWITCHES and rest and _is_value(rest[0]):
            option = Option(name, rest[0], f"{word} {rest.pop(0)}")
        if name in options:
            problems.append(option.problem("is given more than once", "keep one"))
        elif name not in _LAUNCHER:
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
        try:
            parts = _split(option.name.removeprefix("--"), tree)
        except ValueError as error:
            problems.append(option.problem(str(error)))
            continue
        close = nearest(option.name, [name for name in RESERVED if len(name) > 2], 0.8) if len(parts) == 1 else None
        if close and parts[0] not in keys_of(schema):
            problems.append(option.problem("unknown key", f"did you mean {close}?"))
            continue
        node = _value(option, reduce(child, parts, schema), problems)
        for part in reversed(parts):
            node = Node({part: node}, option.origin)
        layer = merge(layer, node, schema)
    return layer


def _split(key: str, tree: Node) -> list[str]:
    """A dotted key in its parts. A name that itself holds dots (an import path) is found where the files have it.

    Raises `ValueError` when it leads through a value that is no section.
    """
    words, parts = key.split("."), list[str]()
    here: Node | None = tree
    while words:
        if here is not None and here.value is not None and not isinstance(here.value, dict):
            raise ValueError(f"cannot be set: {'.'.join(parts)} is {plain_of(here)!r} ({here.origin}), not a section")
        known = here.value if here is not None and isinstance(here.value, dict) else {}
        take = next((n for n in range(len(words), 0, -1) if ".".join(words[:n]) in known), 1)
        parts.append(".".join(words[:take]))
        here, words = known.get(parts[-1]), words[take:]
    return parts


def _value(option: Option, annotation: Any, problems: list[Problem]) -> Node:
    """The value typed after an option, read for a field of this type.

    Text fields take it as it stands. Only what opens like a flow list, flow mapping or quote is parsed as YAML, so
    that `*.png` and `a: b` need no second pair of quotes inside the shell's.
    """
    text, origin = option.value, option.origin
    if text is None:
        if not admits(annotation, bool, Any):
            problems.append(option.problem("needs a value", f"one that starts with a dash is written {option.name}=-x"))
        return Node(True, origin)
    as_text = only_text(annotation)
    opens = text.strip()[:1]
    if opens and (opens in "\"'" or (opens in "[{" and not as_text)):
        try:
            return read_text(text, origin, problems) or Node(None, origin)
        except ConfigError:
            problem = (
                "" if as_text else "is not readable as YAML; put the whole value in quotes, or the shell splits it"
            )
            return Node(text, origin, problem=problem)
    null = text in ("null", "None", "~", "") and admits(annotation, type(None))
    return scalar_node(text, as_text and not null, origin)
