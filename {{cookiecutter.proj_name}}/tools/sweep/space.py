"""The values that a sweep tries, and the trials made of them."""

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from common.base.errors import UserError


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


def read_space(pairs: Sequence[str]) -> dict[str, list[str]]:
    """Read the values that words such as `optim.lr=1e-2,1e-3` list, by dotted key.

    Raises:
        UserError: a word has another form, or a key is given twice.
    """
    space: dict[str, list[str]] = {}
    for pair in pairs:
        if pair.startswith("--") and " " in pair:
            raise UserError(
                f"{pair!r}: write values to try without --, and a setting of all runs before --grid, or as two words"
            )
        key, equals, text = pair.removeprefix("--").partition("=")
        if not (key and equals and text):
            raise UserError(f"{pair!r}: write key=value,value")
        if key in space:
            raise UserError(f"{key} is given twice; keep one")
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


def grid(space: Mapping[str, Sequence[str]], trials: int | None = None, seed: int = 0) -> list[dict[str, str]]:
    """Return every combination of the values, or `trials` of them at random.

    More of them with the same seed begin with the same ones. Raises `UserError` if there are not so many.
    """
    if trials is None:
        return [dict(zip(space, values, strict=True)) for values in product(*space.values())]
    number = math.prod(map(len, space.values()))
    if not 0 < trials <= number:
        raise UserError(f"--trials {trials}: must be from 1 to {number}, the number of combinations")
    source = random.Random(seed)
    found: list[dict[str, str]] = []
    while len(found) < trials:
        combination = {key: source.choice(values) for key, values in space.items()}
        if combination not in found:
            found.append(combination)
    return found


def run_name(values: Mapping[str, str], taken: Sequence[str] = ()) -> str:
    """Return a folder's name such as `lr=1e-2_width=16`, unlike those that are `taken`."""
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in values.items()]
    name = re.sub(r"[^\w.=+,-]+", "-", "_".join(words))
    name = name[:100]
    names = (name if number == 1 else f"{name}_{number}" for number in range(1, len(taken) + 2))
    return next(free for free in names if free not in taken)
