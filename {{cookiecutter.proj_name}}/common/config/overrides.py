"""The command line: `--a.b value`, `--a.b=value` and `--a.b` (true) become the last layer of the configuration."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.config.layers import merge
from common.config.problem import ABSENT, ConfigError, Origin, Problem
from common.config.shape import admits, child, describe, nearest, only_text, section_of, suggest
from common.config.source import Branch, Items, Leaf, Node, leaf, plain_of, read_text

SWITCHES = ("--help", "-h", "--print-config", "--debug")  # reserved options that take no value
RESERVED = (*SWITCHES, "--config", "--configs", "-c", "--list")
_LAUNCHER = ("--local_rank", "--local-rank")  # some launchers add it; the rank comes from the environment
_NUMBER = re.compile(r"-(\.?[0-9]|\.?inf\b)")


@dataclass(frozen=True)
class Flag:
    """One option as typed. `value` is None when none followed it."""

    name: str
    value: str | None
    words: str

    @property
    def origin(self) -> Origin:
        return Origin(f"command line: {self.words}")


def read_flags(words: Sequence[str]) -> tuple[list[Flag], list[Problem]]:
    """Split a command line into options. A word that starts with a dash is a value only when it is a number."""
    flags: list[Flag] = []
    problems: list[Problem] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") and word not in RESERVED:
            problems.append(_stray(word))
            continue
        name, equals, value = word.partition("=")
        given: str | None = value if equals else None
        if not equals and name not in SWITCHES and rest and _is_value(rest[0]):
            given = rest.pop(0)
        if name not in _LAUNCHER:
            shown = word if equals or given is None else f"{word} {given}"
            flags.append(Flag(name, given, shown))
    first: dict[str, Flag] = {}
    for flag in flags:
        if flag is not first.setdefault(flag.name, flag):
            problems.append(Problem(flag.name, ABSENT, "is given more than once", "keep one", flag.origin))
    return list(first.values()), problems


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word == "-" or _NUMBER.match(word) is not None


def _stray(word: str) -> Problem:
    usual = "options are written --key value, lists 1,2,3 or '[1, 2, 3]'"
    hint = f"did you mean --{word}?" if "=" in word else usual
    return Problem("", ABSENT, f"{word!r} belongs to no option", hint, Origin(f"command line: {word}"))


class Layer:
    """Collects options over `tree`, the merged files, which decides what a path may go through."""

    def __init__(self, schema: type, tree: Branch):
        self.schema, self.tree = schema, tree
        self.body = Branch({}, Origin("command line"))
        self.problems: list[Problem] = []

    def add(self, flag: Flag) -> None:
        """Put one option in its place, or note why it has none."""
        parts = _split(flag.name.removeprefix("--"), self.tree)
        if not all(parts):
            self._refuse(flag, "is no key: a part between its dots is empty")
            return
        annotation = self._annotation(flag, parts)
        node = None if annotation is None else self._value(flag, annotation)
        if node is None:
            return
        here = self.body
        for part in parts[:-1]:
            below = here.entries.setdefault(part, Branch({}, flag.origin))
            if isinstance(below, Leaf) and below.value is None:
                below = here.entries[part] = Branch({}, flag.origin)
            assert isinstance(below, Branch)
            here = below
        last = parts[-1]
        here.entries[last] = merge(here.entries[last], node, annotation) if last in here.entries else node

    def _annotation(self, flag: Flag, parts: list[str]) -> Any:
        """The type at the end of the path; None, with the problem noted, when the path leads nowhere."""
        annotation: Any = self.schema
        layers: list[Node | None] = [self.body, self.tree]
        for depth, part in enumerate(parts):
            below = child(annotation, part)
            if below is None:
                self._unknown(flag, annotation, parts[:depth], part)
                return None
            annotation = below
            layers = [layer.entries.get(part) if isinstance(layer, Branch) else None for layer in layers]
            blocked = next((node for node in layers if node is not None and not _passable(node)), None)
            if blocked is not None and depth < len(parts) - 1:
                self._through(flag, parts[: depth + 1], blocked)
                return None
        return annotation

    def _value(self, flag: Flag, annotation: Any) -> Node | None:
        if flag.value is not None:
            return argument(flag.value, annotation, flag.origin, self.problems)
        if admits(annotation, bool):
            return leaf("true", True, flag.origin)
        hint = f"write {flag.name} VALUE, or {flag.name}=VALUE for one that starts with a dash"
        self._refuse(flag, f"needs a value: it must be {describe(annotation)}", hint)
        return None

    def _unknown(self, flag: Flag, annotation: Any, above: list[str], part: str) -> None:
        prefix = "".join(f"{name}." for name in above)
        parent = self.schema if not above else section_of(annotation)
        if parent is None:
            rule = f"cannot be set: {'.'.join(above)} must be {describe(annotation)}, it has no keys"
            self._refuse(flag, rule)
            return
        option = None if "." in flag.name else nearest(flag.name, [name for name in RESERVED if len(name) > 2], 0.8)
        hint = f"did you mean {option}?" if option else suggest(self.schema, parent, prefix, part)
        self._refuse(flag, "unknown key", hint, prefix + part)

    def _through(self, flag: Flag, parts: list[str], blocked: Node) -> None:
        where = ".".join(parts)
        value = plain_of(blocked)
        rule = f"cannot be set: {where} is {value!r} ({blocked.origin}), not a section"
        self._refuse(flag, rule, f"give {where} whole" if isinstance(blocked, Items) else "")

    def _refuse(self, flag: Flag, rule: str, hint: str = "", key: str = "") -> None:
        value = ABSENT if flag.value is None else leaf(flag.value, True, flag.origin).value
        self.problems.append(Problem(key or flag.name.removeprefix("--"), value, rule, hint, flag.origin))


def _passable(node: Node) -> bool:
    """Whether a key can be set below this: a section, or one that is off."""
    return isinstance(node, Branch) or (isinstance(node, Leaf) and node.value is None)


def _split(key: str, tree: Branch) -> list[str]:
    """A dotted key in its parts. A name that itself holds dots (an import path) is found where the files have it."""
    words, parts = key.split("."), list[str]()
    here: Node | None = tree
    while words:
        known = here.entries if isinstance(here, Branch) else {}
        take = next((n for n in range(len(words), 0, -1) if ".".join(words[:n]) in known), 1)
        parts.append(".".join(words[:take]))
        here, words = known.get(parts[-1]), words[take:]
    return parts


def argument(text: str, annotation: Any, origin: Origin, problems: list[Problem]) -> Node:
    """The value typed after an option, read for a field of this type.

    Text fields take it as it stands. Only what opens like a flow list, flow mapping or quote is parsed as YAML, so
    that `*.png` and `a: b` need no second pair of quotes inside the shell's.
    """
    opens = text.strip()[:1]
    if opens and (opens in "\"'" or (opens in "[{" and not only_text(annotation))):
        try:
            node = read_text(text, Origin(origin.source), problems)
        except ConfigError:
            broken = "is not readable as YAML; put the whole value in quotes, or the shell splits it"
            return Leaf(text, text, False, origin, "" if only_text(annotation) else broken)
        return leaf("", True, origin) if node is None else node
    plain = not only_text(annotation) or (admits(annotation, type(None)) and text in ("null", "None", "~", ""))
    return leaf(text, plain, origin)


def option_value(argv: Sequence[str], option: str) -> str | None:
    """The value of `--option value` or `--option=value` in words not checked yet; None if it is not there."""
    for number, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name == option:
            return value or "".join(argv[number + 1 : number + 2])
    return None
