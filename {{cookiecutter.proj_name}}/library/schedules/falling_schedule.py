"""Learning rates that fall as powers, in steps, exponentially, or after a rise: functions of the step."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from common.base.errors import UserError
from common.config import Problem
from common.config.registry import SCHEDULE_REGISTRY
from common.optim.schedule import half_cosine
from common.progress import EpochInterval, Interval


class AboveZero:
    """A check of lengths."""

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        try:
            if not all(Interval.parse(length, "epoch") for length in value):
                yield Problem(key, value, "must each be above 0")
        except UserError:  # reported for the length itself
            return


Positive = Annotated[float, Field(gt=0.0)]
AtLeastOne = Annotated[float, Field(ge=1.0)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
Fall = Literal["linear", "cosine", "sqrt"]
StepAt = Callable[[Any], int]
Lengths = Annotated[Sequence[EpochInterval], Field(min_length=1), AboveZero()]


@SCHEDULE_REGISTRY.register()
def poly(step: int, steps: int, min_factor: float, power: Positive = 0.9) -> float:
    """Falls from 1 to `min_factor` over `steps`, as the remaining fraction of the steps to the power of `power`."""
    return min_factor + (1.0 - min_factor) * (1.0 - min(1.0, step / steps)) ** power


@SCHEDULE_REGISTRY.register()
def multistep(
    step: int, step_at: StepAt, min_factor: float, lr_steps: Lengths = (50, 80), lr_gamma: Positive = 0.1
) -> float:
    """Drops by the factor `lr_gamma` at each of `lr_steps`, from that step on."""
    return max(min_factor, lr_gamma ** bisect_right(sorted(map(step_at, lr_steps)), step))


@SCHEDULE_REGISTRY.register()
def exponential(
    step: int, step_at: StepAt, min_factor: float, lr_steps: Lengths = (50,), lr_gamma: Positive = 0.1
) -> float:
    """Falls exponentially from 1; it reaches `lr_gamma` at the first of `lr_steps`."""
    first = step_at(lr_steps[0])
    if first <= 0:
        raise UserError("optim.lr_scheduler.args.lr_steps[0] is reached during the warm-up; shorten the warm-up")
    return max(min_factor, lr_gamma ** (step / first))


@SCHEDULE_REGISTRY.register()
def wsd(step: int, steps: int, min_factor: float, decay: Share = 0.2, shape: Fall = "linear") -> float:
    """Stays at 1, then falls to `min_factor` over the last fraction `decay` of `steps`; `sqrt` falls fast at first."""
    x = min(1.0, max(0.0, 1.0 - (steps - step) / (decay * steps)))
    fall = {"linear": 1.0 - x, "cosine": half_cosine(x), "sqrt": 1.0 - x**0.5}[shape]
    return min_factor + (1.0 - min_factor) * fall


@SCHEDULE_REGISTRY.register()
def onecycle(
    step: int,
    steps: int,
    min_factor: float,
    pct_start: Share = 0.3,
    div_factor: AtLeastOne = 25.0,
    final_div_factor: AtLeastOne = 1e4,
) -> float:
    """Rises to 1 over the fraction `pct_start` of `steps`, then falls until the last of them, along half cosines.

    It starts at 1 / `div_factor`, and ends at 1 / (`div_factor` * `final_div_factor`).
    """
    start = 1.0 / div_factor
    end = max(min_factor, start / final_div_factor)
    peak, last = pct_start * steps - 1.0, steps - 1.0
    if step < peak:
        return 1.0 + (start - 1.0) * half_cosine(step / peak)
    return end + (1.0 - end) * half_cosine(min(1.0, (step - peak) / (last - peak)))
