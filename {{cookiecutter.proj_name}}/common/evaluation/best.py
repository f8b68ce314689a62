"""Compare validation results: the mode of the metric that decides, the best result so far, early stopping.

A resume continues the last two.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from loguru import logger
from pydantic import Field

from common.base.errors import UserError
from common.config import ABSENT, ConfigError, Problem, section
from common.config.problem import suggestion
from common.config.registry import METRIC_REGISTRY

Mode = Literal["min", "max"]


@section
class BestConfig:
    """Which validation result makes a checkpoint the best one."""

    metric: str = "loss"
    """loss, or the name of a loss or metric"""
    mode: Literal["auto", "min", "max"] = "auto"
    """whether lower (min) or higher (max) is better; auto: as the loss or metric says"""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """how much better a value must be to count as better"""


@section
class EarlyStopConfig:
    """Ends the run when validation no longer gets better. Follows the metric of `best`."""

    patience: Annotated[int, Field(ge=0)] = 0
    """validations without a better value before the end; 0: off"""


class Best(NamedTuple):
    """The best validation so far: its value, the optimizer step, and everything that was measured then."""

    value: float
    step: int
    values: dict[str, float]


@dataclass
class BestTracker:
    """Compares validations. A value that is not finite is never the best; of equal values the older is kept."""

    config: BestConfig
    early: EarlyStopConfig
    mode: Mode
    best: Best | None = None
    waited: int = 0  # validations since the best
    is_restarted: bool = False  # whether the checkpoint was of another metric or mode

    def update(self, values: Mapping[str, float], step: int) -> bool:
        """Record one validation; True if it is the best so far. Raises `UserError` if it lacks the metric."""
        value = values.get(self.config.metric)
        if value is None:
            raise UserError(f"best.metric: {self.config.metric} was not measured; available: {', '.join(values)}")
        gain = math.inf
        if self.best is not None:
            gain = value - self.best.value
            if self.mode == "min":
                gain = -gain
        if not math.isfinite(value):
            logger.warning("best.metric: {} = {} is not finite and cannot be the best", self.config.metric, value)
        elif gain > self.config.min_delta:
            self.best = Best(value, step, dict(values))
            self.waited = 0
            return True
        self.waited += 1
        return False

    def reason_to_stop(self) -> str:
        """Why training should end after this validation; "" to continue."""
        if self.early.patience and self.waited >= self.early.patience:
            return f"{self.config.metric} has not improved for {self.waited} validations (early_stop.patience)"
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best and list(self.best),
            "waited": self.waited,
            "metric": self.config.metric,
            "mode": self.mode,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; a best value of another metric or mode is discarded."""
        if state["metric"] != self.config.metric or state["mode"] != self.mode:
            logger.warning(
                "the checkpoint tracked {metric} ({mode}); the best value, early stopping and plateaus restart", **state
            )
            self.is_restarted = True
            return
        self.best = state["best"] and Best(*state["best"])
        self.waited = state["waited"]


def check_metric_names(
    metrics: Iterable[str],
    losses: Iterable[str],
) -> Iterator[Problem]:
    """Yield a problem for each metric with the name of a loss, whose value it would replace in every record."""
    for metric in metrics:
        if metric in ("loss", *losses):
            rule = "is the name of a loss too, and only one of the two values could be kept"
            hint = "call one of them something else and name its type, as in my_name: {type: ...}"
            yield Problem(f"metric.{metric}", ABSENT, rule, hint)


def find_mode(
    config: BestConfig,
    losses: Iterable[str],
    metrics: Mapping[str, Any],
    sets: Iterable[str],
) -> Mode:
    """Return whether lower or higher values of the metric are better.

    Args:
        losses: those that are measured, by name.
        metrics: sections by name; the classes say what is better (`higher_is_better`).
        sets: names of the validation sets, whose values are called `set.value`; "" for a single one.

    Raises:
        ConfigError: the config has no such metric, its direction is unknown and `mode` auto, or `mode` contradicts it.
    """
    name = config.metric
    mode = config.mode
    measured = {}
    for label in sets:
        for value in (*losses, *metrics):
            measured[f"{label}.{value}".removeprefix(".")] = value
    named = [value for value in measured if f"{name}.".startswith(f"{value}.")]  # a metric may have parts, name.part
    if not named:
        rule = "is neither a loss with a weight other than 0 nor a metric of this config"
        hint = suggestion(name, list(measured), "a part of a metric is METRIC.PART; there is")
        raise ConfigError([Problem("best.metric", name, rule, hint)])
    value = measured[max(named, key=len)]
    higher: bool | None = False  # of a loss, lower values are better
    if value in metrics:
        higher = None
        with suppress(UserError, AttributeError, TypeError):  # of a wrong section, and of a class that does not say it
            section = metrics[value] or {}
            kind: Any = METRIC_REGISTRY.get(section.get("type", value))
            higher = kind.higher_is_better
            if not isinstance(higher, bool):
                higher = None
    if higher is None and mode == "auto":
        rule = f"cannot tell whether higher values of {name} are better"
        hint = "set best.mode to min or max, or higher_is_better in the class of the metric"
        raise ConfigError([Problem("best.mode", mode, rule, hint)])
    usual: Mode = "min"
    direction = "lower"
    if higher:
        usual = "max"
        direction = "higher"
    if mode == "auto":
        return usual
    if higher is not None and mode != usual:
        rule = f"would keep the worst model, since {direction} values of {name} are better"
        raise ConfigError([Problem("best.mode", mode, rule, "leave best.mode out, or set it to auto")])
    return mode
