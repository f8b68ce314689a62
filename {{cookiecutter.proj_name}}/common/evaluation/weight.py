"""The weight of a loss as a function of the position of the run."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from common.base.errors import UserError
from common.config import Problem, section
from common.optim.factors import cosine, linear
from common.progress import EpochInterval, Interval, Place


@section
class WeightSchedule:
    """The weight of a loss: first `start`; from `after` on, it changes, until it is `end` at `until`."""

    type: Annotated[Literal["linear", "cosine"], Field(description="as of optim.lr_scheduler")] = "linear"
    start: Annotated[float, Field(description="first weight")] = 0.0
    end: Annotated[float, Field(description="last weight")] = 1.0
    after: Annotated[EpochInterval, Field(description="when the change begins: epochs, or 100step")] = 0
    until: Annotated[EpochInterval, Field(description="when it ends; null: with the run")] = None

    def problems(self) -> Iterator[Problem]:
        """An end that does not come after the beginning."""
        after, until = Interval.parse(self.after, "epoch"), Interval.parse(self.until, "epoch")
        if self.until is not None and (not until or (until.unit == after.unit and until.amount <= after.amount)):
            yield Problem("until", self.until, f"must be later than after, {self.after}")

    def __call__(self, at: Place) -> float:
        """The weight at a position. Raises `UserError` if `until` is not known in steps."""
        after = Interval.parse(self.after, "epoch").in_steps(at.steps_per_epoch)
        until = Interval.parse(self.until, "epoch").in_steps(at.steps_per_epoch) or at.total
        if until is None:
            raise UserError('until: the length of the run is not known; set this in steps, as in "1000step"')
        schedule = linear if self.type == "linear" else cosine
        rest = schedule(max(0, at.step - after), steps=max(1, until - after), min_factor=0.0)
        return self.end + (self.start - self.end) * rest
