"""Schedules: the factor of the learning rate at a step.

A schedule is a function of `step`, counted from the end of the warm-up: a resumed run needs no history. It can also
take these parameters: `steps` (from the end of the warm-up to `tmax`, or to the end of the run), `milestones`
(`lr_steps`, counted like `step`), `steps_per_epoch` (None for data without length), and the fields of
`LrSchedulerConfig`, as `min_factor`. All others are arguments, which optim.lr_scheduler.args may set.
The one schedule that depends on validation results, and so has a state, is `Plateau`.
"""

import math
from typing import Annotated, Any

from pydantic import Field

from common.base.errors import UserError
from common.config.registry import SCHEDULE_REGISTRY


@SCHEDULE_REGISTRY.register()
def constant(step: int) -> float:
    """Always 1."""
    return 1.0


@SCHEDULE_REGISTRY.register()
def linear(step: int, steps: int, min_factor: float) -> float:
    """Falls from 1 to `min_factor` over `steps`, then stays there."""
    return min_factor + (1.0 - min_factor) * (1.0 - min(1.0, step / steps))


@SCHEDULE_REGISTRY.register("CosineAnnealingLR")
@SCHEDULE_REGISTRY.register()
def cosine(step: int, steps: int, min_factor: float) -> float:
    """Falls from 1 to `min_factor` over `steps` along half a cosine, then stays there."""
    return min_factor + (1.0 - min_factor) * half_cosine(min(1.0, step / steps))


@SCHEDULE_REGISTRY.register("plateau")
class Plateau:
    """Drops after more than `patience` validations in a row without progress, counted as in ReduceLROnPlateau.

    Args:
        min_factor: the lowest factor.
        threshold: relative change of the value that counts as progress.
        mode: "min" or "max", whether lower or higher values are better.
        lr_gamma: factor per drop.
        cooldown: validations after a drop that are not counted.

    Attributes:
        state: plain numbers by name; saved with the run, and restored.
    """

    def __init__(
        self,
        min_factor: float,
        patience: int,
        threshold: float,
        mode: str,
        lr_gamma: float = 0.1,
        cooldown: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        self._gamma, self._floor = lr_gamma, min_factor
        self._patience, self._threshold, self._cooldown, self._mode = patience, threshold, cooldown, mode
        self.state: dict[str, Any] = {"factor": 1.0, "best": None, "bad": 0, "cooldown": 0}

    def __call__(self, step: int) -> float:
        return float(self.state["factor"])

    def after_validation(self, value: float | None) -> None:
        """Count a validation with this `value` of best.metric, the same number on every rank.

        Raises `UserError` without a value, because the rate would then never drop.
        """
        if value is None:
            raise UserError("optim.lr_scheduler.type plateau: this validation gave no value; configure a metric")
        state = self.state
        if self._is_better(value, state["best"]):
            state["best"], state["bad"] = float(value), 0
        else:
            state["bad"] += 1
        if state["cooldown"] > 0:
            state["cooldown"], state["bad"] = state["cooldown"] - 1, 0
        if state["bad"] > self._patience:
            state["factor"] = max(state["factor"] * self._gamma, self._floor)
            state["cooldown"], state["bad"] = self._cooldown, 0

    def _is_better(self, value: float, best: float | None) -> bool:
        if best is None:
            return math.isfinite(value)
        # torch multiplies `best`, so for a negative `best` it counts a slightly worse value as progress.
        gain = best - value if self._mode == "min" else value - best
        return gain > self._threshold * abs(best)


def half_cosine(x: float) -> float:
    """From 1 at x = 0 to 0 at x = 1."""
    return (1.0 + math.cos(math.pi * x)) / 2.0
