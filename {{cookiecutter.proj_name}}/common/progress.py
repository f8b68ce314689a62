"""The position of a run, and what is due when: each "every N steps / epochs" in the config is an `Interval`."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from common.base.errors import UserError
from common.config import Problem, section

Unit = Literal["step", "epoch"]
INTERVAL = re.compile(r"\s*(-?[\d.]+(?:e[-+]?\d{1,2})?|\d+/0*[1-9]\d*)\s*(?:(step|epoch)s?)?\s*")


class Position(NamedTuple):
    """The position of a run.

    `step` counts optimizer steps. `sample` counts the samples used in the current epoch, over all ranks.
    `epoch_size` is the number of samples per epoch, 0 while it is unknown (a dataset without length).
    """

    step: int = 0
    epoch: int = 0
    sample: int = 0
    epoch_size: int = 0


class TaskPosition(NamedTuple):
    """The position that a task sees: optimizer steps and epochs done, and the steps of the run and of an epoch.

    `total` and `steps_per_epoch` are None where unknown.
    """

    step: int = 0
    epoch: int = 0
    total: int | None = None
    steps_per_epoch: int | None = None


def resumed_position(at: Position, epoch_size: int, least: int) -> Position:
    """Return the position for data of `epoch_size` samples; that of the next epoch if fewer than `least` are left.

    Raises `UserError` inside an epoch of another size.
    """
    if at.sample and at.epoch_size != epoch_size:
        raise UserError(
            f"the checkpoint stopped in epoch {at.epoch + 1}, after {at.sample} of {at.epoch_size} samples, but the "
            f"training data has {epoch_size} now; use the same data, or start a new run from the weights: "
            "--init_from.path FILE --name NEW"
        )
    if 0 < epoch_size - at.sample < least:
        return Position(at.step, at.epoch + 1, 0, epoch_size)
    return at._replace(epoch_size=epoch_size)


class Interval(NamedTuple):
    """A length of training in optimizer steps or epochs, as an exact fraction. 0 means never."""

    numerator: int
    denominator: int
    unit: Unit

    @classmethod
    def parse(cls, value: int | float | str | None, unit: Unit) -> "Interval":
        """Parse 10, "10", "200step" or "0.5epoch"; a plain number is in `unit`. None, 0 and negative mean never."""
        if value is None:
            value = 0
        match = INTERVAL.fullmatch(str(value))
        if match is None:
            raise UserError(f'{value!r} is not an interval: write a number of {unit}s, "200step" or "0.5epoch"')
        amount = max(Fraction(match[1]), Fraction(0))
        if match[2]:
            unit = match[2]  # type: ignore[assignment]
        if unit == "step" and amount.denominator != 1:
            raise UserError(f"{value!r} is not an interval: the number of steps must be whole")
        return cls(*amount.as_integer_ratio(), unit)

    def __bool__(self) -> bool:
        return self.numerator > 0

    def in_steps(self, steps_per_epoch: int | None) -> int:
        """This length in optimizer steps, rounded to the nearest; at least 1, or 0 for never.

        Raises `UserError` if it is given in epochs and the dataset has no length.
        """
        if not self:
            return 0
        if self.unit == "step":
            return self.numerator
        if steps_per_epoch is None:
            epochs = f"{self.numerator / self.denominator:g}epoch"
            raise UserError(f'{epochs}: the dataset has no length; set this in steps, as in "1000step"')
        return max(1, round(Fraction(self.numerator * steps_per_epoch, self.denominator)))


def are_due(intervals: Iterable[Interval], before: Position, after: Position) -> list[bool]:
    """Return for each interval whether a multiple of it lies in (before, after]. Exact: calculated in integers."""
    size = after.epoch_size
    spans = {"step": (before.step, after.step, 1), "epoch": (before.epoch, after.epoch, 1)}
    if size:
        spans["epoch"] = (before.epoch * size + before.sample, after.epoch * size + after.sample, size)
    found = []
    for interval in intervals:
        start, end, unit = spans[interval.unit]
        length = interval.numerator * unit
        per = interval.denominator
        is_due = False
        if length > 0:  # more multiples of the interval lie at or below `end` than `start`
            is_due = end * per // length > start * per // length
        found.append(is_due)
    return found


@dataclass(frozen=True)
class IntervalIn:
    """Marks a config field as an interval whose plain numbers are in `unit`."""

    unit: Unit

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        try:
            Interval.parse(value, self.unit)
        except ValueError:
            yield Problem(key, value, f'must be a number of {self.unit}s, "200step" or "0.5epoch"; -1 for never')


EpochInterval = Annotated[int | float | str | None, IntervalIn("epoch")]
StepInterval = Annotated[int | float | str | None, IntervalIn("step")]


@section
class ProgressConfig:
    """Length of a run, and when things happen. Intervals: numbers, "200step" or "0.5epoch"; -1, 0 or null means never.

    Everything that is not "never" also happens after the last step, but not after an early stop.
    """

    epoch: Annotated[int | None, Field(ge=1)] = 40
    """epochs to train; null: max_steps alone decides"""
    max_steps: Annotated[int | None, Field(ge=1)] = None
    """optimizer steps to train; null: epoch alone decides"""
    log_every: StepInterval = 50
    """log line and scalars; steps, one epoch at most"""
    train_metric: bool = False
    """log the metrics of the last step's batch"""
    epoch_val: EpochInterval = 1
    """validation; epochs"""
    init_eval: bool = False
    """evaluate before the first step"""
    epoch_eval: EpochInterval = 10
    """evaluation on dataset.eval; epochs"""
    save_time: float | None = 1800.0
    """save latest.pt after this many seconds; -1 or null: never"""
    epoch_save_latest: EpochInterval = 1
    """save latest.pt; epochs"""
    epoch_save_checkpoint: EpochInterval = 10
    """save a numbered checkpoint; epochs"""

    def problems(self) -> Iterator[Problem]:
        """A run without an end."""
        if self.epoch is None and self.max_steps is None:
            yield Problem("epoch", None, "max_steps is null too, so the run would never end", "set one of them")


class Due(NamedTuple):
    """The actions that are due after a step, in the order of the loop."""

    log: bool
    validate: bool
    evaluate: bool
    save_latest: bool
    save_numbered: bool
    is_last: bool = False


class Triggers:
    """Decides which actions are due after a step.

    Args:
        steps_per_epoch: None if the data has no length.

    Attributes:
        intervals: of the actions, in the order of the loop.
    """

    def __init__(self, config: ProgressConfig, steps_per_epoch: int | None) -> None:
        self._epochs = config.epoch or math.inf
        self._steps = config.max_steps or math.inf
        log = Interval.parse(config.log_every, "step")
        if log.unit == "step" and log.numerator > (steps_per_epoch or math.inf):
            # With a few steps per epoch, most validations would have no training loss beside them.
            log = Interval.parse(1, "epoch")
        self.intervals = [log]
        for value in (config.epoch_val, config.epoch_eval, config.epoch_save_latest, config.epoch_save_checkpoint):
            self.intervals.append(Interval.parse(value, "epoch"))

    def due(self, before: Position, after: Position) -> Due:
        """Return the actions due after the step from `before` to `after`.

        After the last step, all that are not "never".
        """
        if self.is_over(after):
            return Due._make([*map(bool, self.intervals), True])
        return Due(*are_due(self.intervals, before, after))

    def is_over(self, at: Position) -> bool:
        """Return whether the run has reached its configured end."""
        return at.epoch >= self._epochs or at.step >= self._steps


@dataclass
class TrainState:
    """The counters of the loop. A checkpoint holds the first three.

    Attributes:
        at: the position of the run.
        values: the results of the last validation.
        pending: the evaluations of this step (val, eval) that a signal interrupted.
        stop_reason: finished or early_stop; empty while training continues.
        signal: number of the signal that stopped training; 0 for none.
    """

    at: Position
    values: dict[str, float] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    stop_reason: str = ""
    signal: int = 0

    @property
    def is_over(self) -> bool:
        """Whether training ends here, temporarily or for good."""
        return bool(self.stop_reason or self.signal)

    def stop(self, *, reason: str = "", signal: int = 0) -> None:
        """End training after this step. The first reason and the first signal are kept; empty ones have no effect."""
        self.stop_reason = self.stop_reason or reason
        self.signal = self.signal or signal


@dataclass(frozen=True)
class Outcome:
    """How training ended: `reason` is finished, early_stop or the name of a signal."""

    reason: str
    at: Position
    exit_code: int = 0


def total_steps(config: ProgressConfig, steps_per_epoch: int | None) -> int | None:
    """Optimizer steps of the whole run; None if the data has no length and `max_steps` is not set."""
    total = config.max_steps
    if config.epoch is not None and steps_per_epoch is not None:
        by_epochs = config.epoch * steps_per_epoch
        total = min(by_epochs, total or by_epochs)
    return total
