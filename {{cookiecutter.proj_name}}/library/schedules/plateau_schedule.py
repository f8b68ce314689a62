"""The learning rate drops when validation makes no progress."""

import math
from typing import Annotated, Any

from pydantic import Field

from common.config.registry import SCHEDULE_REGISTRY


@SCHEDULE_REGISTRY.register("plateau")
class Plateau:
    """Drops after more than `patience` validations in a row without progress, counted as in ReduceLROnPlateau.

    Args:
        min_factor: the lowest factor.
        mode: "min" or "max", whether lower or higher values are better.
        patience: validations without progress before a drop.
        threshold: relative change of the value that counts as progress.
        lr_gamma: factor per drop.
        cooldown: validations after a drop that are not counted.

    Attributes:
        state: plain numbers by name; saved with the run, and restored.
    """

    def __init__(
        self,
        min_factor: float,
        mode: str,
        patience: Annotated[int, Field(ge=0)] = 10,
        threshold: Annotated[float, Field(ge=0.0)] = 1e-4,
        lr_gamma: Annotated[float, Field(gt=0.0)] = 0.1,
        cooldown: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        self._floor = min_factor
        self._patience = patience
        self._threshold = threshold
        self._mode = mode
        self._gamma = lr_gamma
        self._cooldown = cooldown
        self.state: dict[str, Any] = {"factor": 1.0, "best": None, "bad": 0, "cooldown": 0}

    def __call__(self, step: int) -> float:
        return float(self.state["factor"])

    def after_validation(self, value: float) -> None:
        """Count a validation with this `value` of best.metric, the same number on every rank."""
        state = self.state
        if self._is_better(value, state["best"]):
            state["best"] = float(value)
            state["bad"] = 0
        else:
            state["bad"] += 1
        if state["cooldown"] > 0:
            state["cooldown"] -= 1
            state["bad"] = 0
        if state["bad"] > self._patience:
            state["factor"] = max(state["factor"] * self._gamma, self._floor)
            state["cooldown"] = self._cooldown
            state["bad"] = 0

    def _is_better(self, value: float, best: float | None) -> bool:
        if best is None:
            return math.isfinite(value)
        # torch multiplies `best`, so for a negative `best` it counts a slightly worse value as progress.
        gain = value - best
        if self._mode == "min":
            gain = -gain
        return gain > self._threshold * abs(best)
