"""Where a run is, and what is due when: every "every N steps / epochs" of the configuration is a `Period`."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from common.base.errors import UserError
from common.config import Problem, section

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


@section
class ProgressConfig:
    """Length and rhythm of a run. Periods are numbers, "200step" or "0.5epoch"; -1, 0 or null means never.

    What is on also happens after the last step.
    """

    start_epoch: Annotated[
        int,
        Field(ge=-1, le=0, description="with resume: -1 goes on where the checkpoint stopped, 0 takes only weights"),
    ] = -1
    epoch: Annotated[int | None, Field(ge=1, description="epochs to train; null: max_steps alone decides")] = 40
    max_steps: Annotated[int | None, Field(ge=1, description="optimizer steps to train; null: epoch alone decides")] = (
        None
    )
    epoch_loss: Annotated[int, Field(ge=1, description="log only in every n-th epoch")] = 1
    iter_loss: Annotated[StepPeriod, Field(description="log line and scalars; steps")] = 50
    save_progress: Annotated[bool, Field(description="show training pictures")] = True
    epoch_save_progress: Annotated[int, Field(ge=1, description="pictures only in every n-th epoch")] = 1
    iter_save_progress: Annotated[StepPeriod, Field(description="training pictures; steps")] = 100
    max_samples_train: Annotated[int, Field(ge=1, description="training pictures each time")] = 5
    epoch_val: Annotated[EpochPeriod, Field(description="validation; epochs")] = 1
    save_progress_val: Annotated[bool, Field(description="show validation pictures")] = True
    max_samples_val: Annotated[int, Field(ge=0, description="validation pictures each time")] = 5
    init_eval: Annotated[bool, Field(description="evaluate before the first step")] = False
    epoch_eval: Annotated[EpochPeriod, Field(description="evaluation on dataset.eval; epochs")] = 10
    max_samples_eval: Annotated[int, Field(ge=0, description="evaluation pictures each time")] = 10
    local_progress: Annotated[bool, Field(description="write pictures as files too, not only to TensorBoard")] = False
    save_time: Annotated[
        float | None, Field(description="save latest.pt after this many seconds; -1 or null: never")
    ] = 1800.0
    epoch_save_latest: Annotated[EpochPeriod, Field(description="save latest.pt; epochs")] = 1
    epoch_save_checkpoint: Annotated[EpochPeriod, Field(description="save a numbered checkpoint; epochs")] = 10

    def __post_init__(self) -> None:
        if self.epoch is None and self.max_steps is None:
            raise ValueError("epoch and max_steps are both null, so the run would never end; set one of them")


class Due(NamedTuple):
    """What happens after a step."""

    log: bool = False
    pictures: bool = False
    validate: bool = False
    evaluate: bool = False
    save_latest: bool = False
    save_numbered: bool = False


_NOTHING = Due()


@dataclass(frozen=True)
class Rhythm:
    """The periods of a run."""

    log: Period
    pictures: Period
    validate: Period
    evaluate: Period
    save_latest: Period
    save_numbered: Period

    @classmethod
    def of(cls, config: ProgressConfig) -> "Rhythm":
        return cls(
            log=Period.parse(config.iter_loss, "step"),
            pictures=Period.parse(config.iter_save_progress if config.save_progress else None, "step"),
            validate=Period.parse(config.epoch_val, "epoch"),
            evaluate=Period.parse(config.epoch_eval, "epoch"),
            save_latest=Period.parse(config.epoch_save_latest, "epoch"),
            save_numbered=Period.parse(config.epoch_save_checkpoint, "epoch"),
        )

    def due(self, before: Position, after: Position, *, last: bool) -> Due:
        """What is due once the step from `before` to `after` is done; after the last step, everything that is on."""
        if last:
            return Due(*map(bool, self.periods))
        # Mostly nothing is. Inside an epoch only those can be due that are not of whole epochs.
        for period in self.within_epochs if after.epoch == before.epoch else self.periods:
            if period.due(before, after):
                return Due(*(each.due(before, after) for each in self.periods))
        return _NOTHING

    @cached_property
    def within_epochs(self) -> tuple[Period, ...]:
        """Those that can be due before an epoch has ended."""
        return tuple(each for each in self.periods if each and (each.unit == "step" or each.divisor > 1))

    @cached_property
    def periods(self) -> tuple[Period, ...]:
        """In the order of `Due`."""
        return (self.log, self.pictures, self.validate, self.evaluate, self.save_latest, self.save_numbered)

    def table(self, without: Collection[str] = ()) -> str:
        """What happens when, one line each, in the order of the loop; for those in `without` there are no data."""
        rows = {
            "log line, scalars": self.log,
            "training pictures": self.pictures,
            "validation": self.validate,
            "evaluation": self.evaluate,
            "latest.pt": self.save_latest,
            "step_*.pt": self.save_numbered,
        }
        return "\n".join(
            f"  {name:<18} {'never (no data)' if name in without else period}" for name, period in rows.items()
        )


@dataclass(frozen=True)
class Outcome:
    """How training ended: `reason` is finished, early_stop or the name of a signal."""

    reason: str
    at: Position
    values: dict[str, float]
    checkpoint: Path
    exit_code: int = 0


def is_over(at: Position, config: ProgressConfig) -> bool:
    """Whether the run has come as far as the config wants."""
    return (config.epoch is not None and at.epoch >= config.epoch) or (
        config.max_steps is not None and at.step >= config.max_steps
    )


def total_steps(config: ProgressConfig, steps_per_epoch: int | None) -> int | None:
    """Optimizer steps of the whole run; None when the data has no length and `max_steps` is not given."""
    by_epochs = None if config.epoch is None or steps_per_epoch is None else config.epoch * steps_per_epoch
    known = [steps for steps in (by_epochs, config.max_steps) if steps is not None]
    return min(known, default=None)
