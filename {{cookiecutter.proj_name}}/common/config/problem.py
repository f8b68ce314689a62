"""Problems of a configuration, where its values were written, and the names that were meant."""

import difflib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from common.base.errors import UserError

RESERVED = ("--help", "--print-config", "--debug", "--config", "--list")  # options that are not keys
MAX_SHOWN = 20  # problems in one message: about one screen


ABSENT: Any = object()
"""The value of a missing key; not None, since a key may be null."""


DEFAULT = "default"
"""The origin of a default value. Others are a file and its line, or the words of the command line."""


@dataclass(frozen=True)
class Problem:
    """One broken rule. `key` is the full dotted key, or in a section's `problems`, relative to it. A section as `value`
    is not shown. The loader fills in `origin`. One that `warns` does not refuse the configuration.

    `is_unknown`: there is no such key; in the record of a run, which an earlier version wrote, it is dropped.
    """

    key: str
    value: Any
    rule: str
    hint: str = ""
    origin: str | None = None
    is_unknown: bool = False
    warns: bool = False

    def __str__(self) -> str:
        is_shown = self.value is not ABSENT and not isinstance(self.value, dict)
        head = f"{self.key} = {shorten(self.value)}".removeprefix(" = ") if is_shown else self.key
        where = f"({self.origin})" if self.origin else ""
        rule = f"{self.rule}; {self.hint}" if self.hint else self.rule
        return f"  {'  '.join(filter(None, (head, where)))}\n      {rule}"


class ConfigError(UserError):
    """All problems of one configuration; its text fits on one screen."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"The configuration has {count} problem{'s' * (count != 1)}:"
        more = [f"  ... and {count - MAX_SHOWN} more"] if count > MAX_SHOWN else []
        return "\n".join([head, *(str(problem) for problem in self.problems[:MAX_SHOWN]), *more])


_YAML_WORDS = {
    "a valid integer": "an integer", "a valid number": "a number", "a valid boolean": "true or false",
    "a valid string": "text", "a valid array": "a list, as in '[a, b]'", "an object": "a section",
    "Field required": "a longer list",
}  # fmt: skip


def rule_of(errors: Sequence[ErrorDetails]) -> str:
    """Pydantic's message about one value, in YAML terms: "must be an integer or a list".

    `errors`: one for each alternative of a union.
    """
    if errors[0]["type"] == "value_error":  # from a `__post_init__`
        return str(errors[0]["ctx"]["error"])
    said = [error["msg"].removeprefix("Input should be ") for error in errors]
    text = " or ".join(dict.fromkeys(_YAML_WORDS.get(kind, kind) for kind in said))
    return text if text[0].isupper() else f"must be {text}"


def shorten(value: Any, width: int = 60) -> str:
    """`value` as YAML would write it on one line, cut to `width` characters."""
    text = repr(value)
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def join(key: str, part: str | int) -> str:
    """Return the dotted key of the item at a key or index of the value at `key`."""
    if isinstance(part, int):
        return f"{key}[{part}]"
    return f"{key}.{part}".removeprefix(".")


def overlapping(keys: Collection[str], others: Collection[str]) -> list[str]:
    """Select those of `others` that lie within any of `keys`, or contain any. A list counts as a whole."""
    whole = [key.partition("[")[0] for key in keys]
    return [other for other in others if any(_is_within(other, key) or _is_within(key, other) for key in whole)]


def _is_within(key: str, above: str) -> bool:
    return key == above or key.startswith((f"{above}.", f"{above}["))


def shown_path(path: str | Path) -> str:
    """`path` as a person would type it: relative to the working directory when below it."""
    full = Path(os.path.abspath(path))  # `resolve` would follow links and show a name that was not typed
    if full.is_relative_to(Path.cwd()):
        full = full.relative_to(Path.cwd())
    return str(full)


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate closest to `name`, ignoring case and dashes; None if none is close."""
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), folded, 1, cutoff)
    return folded[matches[0]] if matches else None


def suggestion(name: str, candidates: Iterable[str], otherwise: str = "valid") -> str:
    """Return a hint: the candidate closest to `name`, or all of them if none is close."""
    candidates = list(candidates)
    near = nearest(name, candidates)
    return f"did you mean {near}?" if near else f"{otherwise}: {', '.join(candidates) or 'none'}"


def match_names(patterns: Sequence[str], names: Sequence[str], key: str) -> list[str]:
    """Return the names of parameters or modules that any of `patterns` matches, in their order. * matches dots too.

    Args:
        key: config key, for the message.

    Raises:
        UserError: a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = nearest(pattern, names)
            hint = f"did you mean {near}?" if near else "available: " + join_names(names)
            raise UserError(f"{key}: {pattern} matches none of the model's {len(names)} names; {hint}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def join_names(names: Sequence[str], limit: int = 8) -> str:
    """Return the first names, and how many more there are."""
    more = [f"and {len(names) - limit} more"] if len(names) > limit else []
    return ", ".join([*names[:limit], *more])
