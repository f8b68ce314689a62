"""When something is due. Every "every N steps / epochs" of the configuration becomes a `Period` at the door."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from common.config import Problem
from common.errors import UserError

Unit = Literal["step", "epoch"]
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?|\d+/\d+)\s*(step|epoch)s?\s*")


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    `step` counts optimizer steps. `sample` counts the samples of the current epoch that were used, over all ranks;
    `epoch_size` is how many the epoch has, 0 while that is unknown (a data set without length).
    """

    step: int = 0
    epoch: int = 0
    sample: int = 0
    epoch_size: int = 0


@dataclass(frozen=True)
class Period:
    """A length of training: `amount` optimizer steps, or `amount` epochs. An amount of 0 means never."""

    amount: Fraction
    unit: Unit

    @classmethod
    def parse(cls, value: int | float | str | None, unit: Unit) -> "Period":
        """Read 10, "10", "200step" or "0.5epoch"; a bare number is in `unit`. None, 0 and negative numbers mean never."""
        if value is None:
            return cls(Fraction(0), unit)
        if isinstance(value, (int, float)):
            return cls(max(Fraction(str(value)), Fraction(0)), unit)
        match = _TEXT.fullmatch(value)
        if match is None:
            number = value.strip().lstrip("-")
            if number.replace(".", "", 1).isdigit():
                return cls.parse(float(value), unit)
            raise UserError(f'{value!r} is not a period: write a number of {unit}s, "200step" or "0.5epoch"')
        amount = Fraction(match[1])
        if match[2] == "step" and amount.denominator != 1:
            raise UserError(f"{value!r} is not a period: a part of a step cannot be done")
        return cls(amount, "step" if match[2] == "step" else "epoch")

    def __bool__(self) -> bool:
        return self.amount > 0

    def __str__(self) -> str:
        if not self:
            return "never"
        amount = int(self.amount) if self.amount.denominator == 1 else float(self.amount)
        return f"every {self.unit}" if amount == 1 else f"every {amount} {self.unit}s"

    def due(self, before: Position, after: Position) -> bool:
        """Whether a multiple of this period lies in (before, after]. The one question behind every cadence."""
        return self._passed(after) > self._passed(before)

    def _passed(self, at: Position) -> int:
        """Multiples of this period up to `at`. Whole numbers only: exact, and cheap enough to ask every step."""
        if self.amount <= 0:
            return 0
        number, divisor = self.amount.numerator, self.amount.denominator
        if self.unit == "step":
            return at.step * divisor // number
        size = at.epoch_size or 1
        return (at.epoch * size + at.sample) * divisor // (size * number)

    def in_steps(self, steps_per_epoch: int | None) -> int:
        """This length in optimizer steps, rounded to the nearest, at least 1 when it is on.

        Raises `UserError` when it is given in epochs and the data set has no length.
        """
        if not self:
            return 0
        if self.unit == "step":
            return int(self.amount)
        if steps_per_epoch is None:
            raise UserError(f'{self}: the data set has no length; give this in steps, as in "1000step"')
        return max(1, round(self.amount * steps_per_epoch))


@dataclass(frozen=True)
class _PeriodIn:
    """Marks a config field as a period whose bare numbers are in `unit`."""

    unit: Unit

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if value is None or (isinstance(value, (int, float, str)) and not isinstance(value, bool)):
            try:
                Period.parse(value, self.unit)
            except (UserError, ValueError, OverflowError):
                yield Problem(key, value, f'must be a number of {self.unit}s, "200step" or "0.5epoch"; -1 for never')


EpochPeriod = Annotated[int | float | str | None, _PeriodIn("epoch")]
StepPeriod = Annotated[int | float | str | None, _PeriodIn("step")]
