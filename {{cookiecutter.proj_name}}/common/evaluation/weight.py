"""The weight of a loss as a function of the position of the run."""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field

import common.optim  # noqa: F401 - fills the registry
from common.base.errors import UserError
from common.config import Problem, section
from common.config.arguments import check_arguments, parameter_names
from common.config.registry import SCHEDULE_REGISTRY, Registered
from common.progress import EpochInterval, Interval, Place


@section
class WeightSchedule:
    """The weight of a loss: `start`, from `after` on as a schedule leads to `end`, which is reached at `until`."""

    type: Annotated[
        str, Registered(SCHEDULE_REGISTRY), Field(description="linear, cosine, poly, or a function of (step, steps)")
    ] = "linear"
    start: Annotated[float, Field(description="first weight")] = 0.0
    end: Annotated[float, Field(description="last weight")] = 1.0
    after: Annotated[EpochInterval, Field(description="when the change begins")] = 0
    until: Annotated[EpochInterval, Field(description="when it ends; null = with the run")] = None
    args: Annotated[dict[str, Any], Field(description="further arguments, as in {power: 2}")] = field(
        default_factory=dict
    )

    def problems(self) -> Iterator[Problem]:
        """A schedule without an end, wrong arguments, and an end that does not come after the beginning."""
        try:
            target = SCHEDULE_REGISTRY.get(self.type)
        except UserError:
            return  # the registry reports it
        known = parameter_names(target)
        if isinstance(target, type) or not {"step", "steps"} <= set(known):
            hint = "take linear, cosine, poly, or a function of your own with the parameters step and steps"
            yield Problem("type", self.type, "has no end, so it cannot lead from one weight to another", hint)
            return
        provided = tuple(name for name in ("step", "steps", "min_factor") if name in known)
        yield from check_arguments(target, self.args, "args", lambda: self.type, provided)
        after, until = Interval.parse(self.after, "epoch"), Interval.parse(self.until, "epoch")
        if self.until is not None and (not until or (until.unit == after.unit and until.amount <= after.amount)):
            yield Problem("until", self.until, f"must be later than after: {self.after}")

    def __call__(self, at: Place) -> float:
        """The weight at a position. Raises `UserError` if its lengths are not known in steps."""
        function = SCHEDULE_REGISTRY.get(self.type)
        after = Interval.parse(self.after, "epoch").in_steps(at.steps_per_epoch)
        until = Interval.parse(self.until, "epoch").in_steps(at.steps_per_epoch) or at.total
        if until is None:
            raise UserError('until: the length of the run is not known; set this in steps, as in "1000step"')
        lowest = {"min_factor": 0.0} if "min_factor" in parameter_names(function) else {}
        part = function(max(0, at.step - after), steps=max(1, until - after), **lowest, **self.args)
        return self.end + (self.start - self.end) * float(part)
