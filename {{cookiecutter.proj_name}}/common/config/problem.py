"""Problems of a configuration, where its values were written, and the names that were meant."""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from common.base.errors import UserError

RESERVED = ("--help", "--print-config", "--debug", "--config", "--list")  # options that are not keys

ABSENT: Any = object()
"""The value of a missing key; not None, since a key may be null."""


DEFAULT = "default"
"""The origin of a default value. Others are a file and its line, or the words of the command line."""


@dataclass(frozen=True)
class Problem:
    """One broken rule. `key` is the full dotted key, or in a section's `problems`, relative to it. A section as `value`
    is not shown. `resolve` fills in `origin`.

    `is_unknown`: there is no such key; in the record of a run, which an earlier version wrote, it is dropped.
    """

    key: str
    value: Any
    rule: str
    hint: str = ""
    origin: str | None = None
    is_unknown: bool = False

    def __str__(self) -> str:
        text = self.key
        if self.value is not ABSENT and not isinstance(self.value, dict):
            text = f"{self.key} = {shorten(self.value)}".removeprefix(" = ")
        if self.origin:
            text = f"{text}  ({self.origin})".lstrip()
        text = f"  {text}\n      {self.rule}"
        if self.hint:
            text += f"; {self.hint}"
        return text


class ConfigError(UserError):
    """All problems of one configuration."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        counted = f"{len(self.problems)} problems"
        if len(self.problems) == 1:
            counted = "1 problem"
        return "\n".join([f"The configuration has {counted}:", *map(str, self.problems)])


def problems_of(key: str, value: Any, error: ValidationError) -> Iterator[Problem]:
    """Yield what pydantic says of the `value` at `key`, or of its items: "must be a valid integer or a list".

    Of a union's alternatives, those that got the furthest into the value count.
    """
    places: dict[str, list[ErrorDetails]] = {}
    for each in error.errors(include_url=False):
        places.setdefault(_place(key, value, each), []).append(each)
    for place, errors in places.items():
        if not any(other != place and is_within(other, place) for other in places):
            yield Problem(place, errors[0]["input"], _rule(errors))


def _rule(errors: Sequence[ErrorDetails]) -> str:
    rules = dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in errors)
    rule = " or ".join(rules).replace("a valid array", "a list").replace("an object", "a mapping")
    if errors[0]["type"] == "value_error":  # from a validator
        rule = str(errors[0]["ctx"]["error"])
    elif not rule[0].isupper():
        rule = f"must be {rule}"
    return rule


def _place(key: str, value: Any, error: ErrorDetails) -> str:
    """Return the key of the item of `value` that an error is about; pydantic names a union's alternatives too."""
    for part in error["loc"]:
        if isinstance(part, int):
            key = join(key, part)
            if isinstance(value, list):
                value = dict(enumerate(value)).get(part)
        elif isinstance(value, dict) and part in value:
            key = join(key, part)
            value = value[part]
    return key


def shorten(value: Any, width: int = 60) -> str:
    """`value` as YAML would write it on one line, cut to `width` characters."""
    text = repr(value)
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = text.lower()
    if len(text) > width:
        text = f"{text[: width - 4]} ..."
    return text


def join(key: str, part: str | int) -> str:
    """Return the dotted key of the item at a key or index of the value at `key`."""
    if isinstance(part, int):
        return f"{key}[{part}]"
    return f"{key}.{part}".removeprefix(".")


def is_within(key: str, above: str) -> bool:
    """Return whether a dotted key is that of the section or list `above`, or of something in it."""
    return key == above or key.startswith((f"{above}.", f"{above}["))


def origin_of(key: str, origins: Mapping[str, str]) -> str:
    """Return where a key was written, or the nearest section around it."""
    while key and origins.get(key, DEFAULT) == DEFAULT:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return origins.get(key, DEFAULT)


def shown_path(path: str | Path) -> str:
    """`path` as a person would type it: relative to the working directory when below it."""
    full = Path(os.path.abspath(path))  # `resolve` would follow links and show a name that was not typed
    if full.is_relative_to(Path.cwd()):
        full = full.relative_to(Path.cwd())
    return str(full)


def did_you_mean(name: str, candidates: Mapping[str, str], cutoff: float = 0.6) -> str:
    """Return a hint: what is shown for the candidate closest to `name`, ignoring case and dashes; "" if none is close.

    Args:
        candidates: what is shown for each.
    """
    folded = {candidate.lower().replace("-", "_"): shown for candidate, shown in candidates.items()}
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), folded, 1, cutoff)
    if not matches:
        return ""
    return f"did you mean {folded[matches[0]]}?"


def suggestion(name: str, candidates: Iterable[str], otherwise: str) -> str:
    """Return a hint: the candidate closest to `name`, or all of them if none is close."""
    known = {candidate: candidate for candidate in candidates}
    return did_you_mean(name, known) or f"{otherwise}: {join_names(list(known), 20) or 'none'}"


def match_names(patterns: Sequence[str], names: Sequence[str], key: str) -> list[str]:
    """Return the names of parameters or modules that any of `patterns` matches, in their order. * matches dots too.

    Args:
        key: config key, for the message.

    Raises:
        UserError: a pattern matches nothing.
    """
    matched = set()
    for pattern in patterns:
        of_pattern = [name for name in names if fnmatchcase(name, pattern)]
        if not of_pattern:
            hint = suggestion(pattern, names, "available")
            raise UserError(f"{key}: {pattern} matches none of the model's {len(names)} names; {hint}")
        matched.update(of_pattern)
    return [name for name in names if name in matched]


def join_names(names: Sequence[str], limit: int = 8) -> str:
    """Return the first names, and how many more there are."""
    text = ", ".join(names[:limit])
    if len(names) > limit:
        text += f", and {len(names) - limit} more"
    return text
