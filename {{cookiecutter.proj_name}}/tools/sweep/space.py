"""The values that a sweep tries: choices and ranges, and the trials made of them."""

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from common.base.errors import UserError
from tools.runs.compare import short_names

SPEC = "log:1e-5:1e-1 (logarithmic), float:0:0.5, int:16:64, logint:16:1024, or choices: a,b,c"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log|float|int|logint):({_NUMBER}):({_NUMBER})")


class Range(NamedTuple):
    """Numbers from `low` to `high`, both included; with `log`, each order of magnitude is equally likely."""

    low: float
    high: float
    log: bool
    whole: bool

    @classmethod
    def parse(cls, key: str, text: str) -> "Range":
        """Return the range that `text` describes, as in `SPEC`. Raises `UserError`."""
        match = _RANGE.fullmatch(text)
        if match is None:
            raise UserError(f"{key}={text}: is not a range; write {SPEC}")
        low, high, log, whole = float(match[2]), float(match[3]), "log" in match[1], "int" in match[1]
        if low >= high:
            raise UserError(f"{key}={text}: the first bound must be the lower")
        if log and low <= 0:
            raise UserError(f"{key}={text}: the lower bound must be above 0")
        if whole and not (low.is_integer() and high.is_integer()):
            raise UserError(f"{key}={text}: the bounds must be integers")
        return cls(low, high, log, whole)

    def draw(self, source: random.Random) -> str:
        """Draw a random number, as written on a command line: to three digits, so that it fits into a run's name."""
        if self.whole and not self.log:
            return str(source.randint(int(self.low), int(self.high)))
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = source.uniform(low, high)
        value = min(max(math.exp(value) if self.log else value, self.low), self.high)
        return str(round(value)) if self.whole else f"{value:.3g}"


Space = dict[str, list[str] | Range]
"""The values to try, by dotted key: choices, as written on a command line, or a range."""


@dataclass
class Trial:
    """One run of a sweep.

    Attributes:
        name: of the run and its folder.
        values: what it is trained with, by dotted key, as written on a command line.
        config: all settings, as plain data.
        state: waiting, running, stopped, failed or finished.
        reason: why it failed or stopped.
    """

    name: str
    values: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    state: str = "waiting"
    reason: str = ""

    @property
    def words(self) -> list[str]:
        """Its values as options of train.py."""
        return [f"--{key}={value}" for key, value in self.values.items()]


def read_space(pairs: Sequence[str], *, ranges: bool) -> Space:
    """Read the space that words such as `optim.lr=1e-2,1e-3` describe; with `ranges` also `optim.lr=log:1e-5:1e-1`.

    Raises:
        UserError: a word has another form, or a key is given twice.
    """
    space: Space = {}
    for pair in pairs:
        key, equals, text = pair.removeprefix("--").partition("=")
        if not (key and equals and text):
            raise UserError(f"{pair!r}: write key=value,value" + (f"; a value is {SPEC}" if ranges else ""))
        if key in space:
            raise UserError(f"{key} is given twice; keep one")
        if ranges and re.match(f"(log|float|int|logint):|{_NUMBER}:{_NUMBER}$", text):
            space[key] = Range.parse(key, text)
            continue
        choices = space[key] = split(text)
        if len(set(choices)) < len(choices) or "" in choices:
            raise UserError(f"{key}={text}: the values must differ, and none may be empty")
    return space


def split(text: str) -> list[str]:
    """`text` cut at its commas, except inside brackets and quotes: `[1,2],[3,4]` are two lists."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote or sign in "'\"":
            quote = "" if sign == quote else quote or sign
        depth += 0 if quote else (sign in "[{(") - (sign in "]})")
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def grid(space: Space) -> list[dict[str, str]]:
    """Return every combination of the choices."""
    lists = [values for values in space.values() if isinstance(values, list)]
    return [dict(zip(space, values, strict=True)) for values in product(*lists)]


def draw(space: Space, trials: int, seed: int) -> list[dict[str, str]]:
    """Random trials, all different; more of them with the same seed begin with the same ones. Raises `UserError`."""
    source, drawn = random.Random(seed), dict[tuple[str, ...], dict[str, str]]()
    for _ in range(100 * trials):
        values = {k: item.draw(source) if isinstance(item, Range) else source.choice(item) for k, item in space.items()}
        drawn.setdefault(tuple(values.values()), values)
        if len(drawn) == trials:
            return list(drawn.values())
    count = "one trial" if len(drawn) == 1 else f"{len(drawn)} different trials"
    raise UserError(f"--trials {trials}: this space has only {count}; ask for fewer, or widen it")


def run_name(values: Mapping[str, str], taken: Sequence[str] = ()) -> str:
    """Return a folder's name such as `lr=1e-2_width=16`, unlike those that are `taken`."""
    short = short_names(list(values))
    name = re.sub(r"[^\w.=+,-]+", "-", "_".join(f"{short[key]}={value}" for key, value in values.items()))
    name = name[:100]
    names = (name if number == 1 else f"{name}_{number}" for number in range(1, len(taken) + 2))
    return next(free for free in names if free not in taken)
