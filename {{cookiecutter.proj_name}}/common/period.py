"""When something is due. Every "every N steps / epochs" of the configuration becomes a `Period` at the door."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple

from common.config import Problem
from common.errors import UserError

Unit = Literal["step", "epoch"]
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?|\d+/0*[1-9]\d*)\s*(step|epoch)s?\s*")


class Position(NamedTuple):
    """How far a run has come.

    `step` counts optimizer steps. `sample` counts the samples of the current epoch that were used, over all ranks;
    `epoch_size` is how many the epoch has, 0 while that is unknown (a data set without length).
    """

    step: int = 0
    epoch: int = 0
    sample: int = 0
    epoch_size: int = 0


def resumed_position(at: Position, epoch_size: int) -> Position:
    """Where to go on with data of `epoch_size` samples. Raises `UserError` inside an epoch of another size."""
    if at.sample and at.epoch_size != epoch_size:
        raise UserError(
            f"the checkpoint stopped inside epoch {at.epoch}, after {at.sample} of {at.epoch_size} samples, but the "
            f"training data has {epoch_size} now; use the same data, or take only the weights: --progress.start_epoch 0"
        )
    return at._replace(epoch_size=epoch_size)


@dataclass(frozen=True)
class Period:
    """A length of training: `number / divisor` optimizer steps, or epochs. A number of 0 means never.

    Two whole numbers: exact where a float is not, and cheap enough to be asked about in every step.
    """

    number: int
    divisor: int
    unit: Unit

    @classmethod
    def parse(cls, value: int | float | str | None, unit: Unit) -> "Period":
        """Read 10, "10", "200step" or "0.5epoch"; a bare number is in `unit`. None, 0 and less mean never."""
        if value is None:
            return cls(0, 1, unit)
        if isinstance(value, (int, float)):
            amount = max(Fraction(str(value)), Fraction(0))
            return cls(amount.numerator, amount.denominator, unit)
        match = _TEXT.fullmatch(value)
        if match is None:
            number = value.strip().lstrip("-")
            if number.replace(".", "", 1).isdigit():
                return cls.parse(float(value), unit)
            raise UserError(f'{value!r} is not a period: write a number of {unit}s, "200step" or "0.5epoch"')
        amount = Fraction(match[1])
        if match[2] == "step" and amount.denominator != 1:
            raise UserError(f"{value!r} is not a period: a part of a step cannot be done")
        return cls(amount.numerator, amount.denominator, "step" if match[2] == "step" else "epoch")

    def __bool__(self) -> bool:
        return self.number > 0

    def __str__(self) -> str:
        if not self:
            return "never"
        amount = self.number if self.divisor == 1 else self.number / self.divisor
        return f"every {self.unit}" if amount == 1 else f"every {amount} {self.unit}s"

    def due(self, before: Position, after: Position) -> bool:
        """Whether a multiple of this period lies in (before, after]. The one question behind every cadence."""
        if self.number == 0:
            return False
        if self.unit == "step":
            return after.step * self.divisor // self.number > before.step * self.divisor // self.number
        # In samples since the start of the run.
        size = after.epoch_size or 1
        length = size * self.number
        done, done_before = (at.epoch * size + (at.sample if at.epoch_size else 0) for at in (after, before))
        return done * self.divisor // length > done_before * self.divisor // length

    def in_steps(self, steps_per_epoch: int | None) -> int:
        """This length in optimizer steps, rounded to the nearest, at least 1 when it is on.

        Raises `UserError` when it is given in epochs and the data set has no length.
        """
        if not self:
            return 0
        if self.unit == "step":
            return self.number // self.divisor
        if steps_per_epoch is None:
            raise UserError(f'{self}: the data set has no length; give this in steps, as in "1000step"')
        return max(1, round(Fraction(self.number * steps_per_epoch, self.divisor)))


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
