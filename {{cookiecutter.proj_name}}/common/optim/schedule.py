"""The learning rate of every optimizer step: the configured rate x the factor of a registered schedule.

A schedule is a function of `step`, counted from the end of the warm-up: a resumed run needs no history. It can also
take these parameters: `steps` (from the end of the warm-up to `tmax`, or to the end of the run), `step_at` (a function:
a length from the start of the run, 5 or "100step" -> a number that counts like `step`), `steps_per_epoch` (None for
data without length), `mode` (min or max: what is better in best.metric), and the fields of `LrSchedulerConfig`, as
`min_factor`. All others are arguments, which optim.lr_scheduler.args may set.

A schedule that depends on validation results is a class: objects are called with the step too, and have a method
`after_validation(value)` and an attribute `state`, plain numbers by name, which is saved with the run and restored.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from functools import partial
from typing import Annotated, Any

from loguru import logger
from pydantic import Field
from torch.optim import Optimizer

from common.base.errors import UserError, error_context
from common.config import Problem, section
from common.config.arguments import check_arguments, fit_arguments, parameter_names
from common.config.registry import SCHEDULE_REGISTRY, Registered, file_of
from common.progress import EpochInterval, Interval


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


def half_cosine(x: float) -> float:
    """From 1 at x = 0 to 0 at x = 1."""
    return (1.0 + math.cos(math.pi * x)) / 2.0


@section
class LrSchedulerConfig:
    """How the learning rate changes. Lengths count from the start of the run, in epochs or as "100step"."""

    type: Annotated[str, Registered(SCHEDULE_REGISTRY)] = "constant"
    """one of --list schedules"""
    warmup: EpochInterval = 0
    """length of the linear rise; the step after it has lr; 0 = none"""
    warmup_factor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """the rise starts just above this factor"""
    tmax: EpochInterval = None
    """when a decaying schedule ends; null = with the run"""
    min_factor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """lowest factor of lr, after the warm-up"""
    args: dict[str, Any] = field(default_factory=dict)
    """its further arguments"""

    def problems(self) -> Iterator[Problem]:
        """Types that are not schedules, wrong arguments, and invalid lengths."""
        with suppress(UserError):
            target = SCHEDULE_REGISTRY.get(self.type)
            if isinstance(target, type) and not hasattr(target, "after_validation"):
                hint = "see --list schedules, or write custom/NAME_schedule.py; torch's do not fit"
                yield Problem("type", self.type, "is not a function of the step", hint)
                return
            ours = {"step", "steps", "step_at", "mode", *vars(self)}  # these do not come from `args`
            if "steps_per_epoch" not in self.args:
                ours.add("steps_per_epoch")
            provided = tuple(ours.intersection(parameter_names(target)))
            yield from check_arguments(target, self.args, "args", f"{self.type} ({file_of(target)})", provided)
        if str(self.warmup).lstrip().startswith("-") and self.warmup != -1:
            yield Problem("warmup", self.warmup, "must not be negative", "0 means none")
        if self.tmax is not None and not Interval.parse(self.tmax, "epoch"):
            yield Problem("tmax", self.tmax, "must be above 0; null means the end of the run")


class Schedule:
    """Learning rate of each parameter group = its initial learning rate x factor(step).

    During the warm-up it rises linearly to the schedule's first factor; it is above 0 at the first step.

    Args:
        total_steps: optimizer steps of the run; None for a run of unknown length.
        steps_per_epoch: None for data without length.
        mode: min or max, what is better in best.metric.
        cut: the run is cut short, by progress.max_steps or for debugging, so a warm-up that leaves no step to the
            schedule is shortened.

    Raises:
        UserError: the schedule needs a number that is unknown, or the warm-up is too long.
    """

    def __init__(
        self,
        config: LrSchedulerConfig,
        optimizer: Optimizer,
        total_steps: int | None,
        steps_per_epoch: int | None,
        *,
        mode: str = "min",
        cut: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._start = config.warmup_factor

        def in_steps(key: str, length: Any) -> int:
            with error_context(f"in optim.lr_scheduler.{key} {length}"):
                return Interval.parse(length, "epoch").in_steps(steps_per_epoch)

        warmup = in_steps("warmup", config.warmup)
        target: Any = SCHEDULE_REGISTRY.get(config.type)
        names = parameter_names(target)
        known = {**vars(config), "mode": mode, "steps_per_epoch": steps_per_epoch}
        if "steps" in names:
            end = in_steps("tmax", config.tmax) or total_steps
            if end is None:
                hint = 'set optim.lr_scheduler.tmax in steps, as in "10000step", or give the run progress.max_steps'
                raise UserError(f"optim.lr_scheduler.type {config.type}: the length of the run is unknown; {hint}")
            if cut and config.tmax is None and end <= warmup:
                logger.warning("the warm-up of {} steps is shortened, since this run has only {}", warmup, end)
                warmup = end - 1
            if end <= warmup:
                rule = f"{config.type} is reached at step {end}, in a warm-up of {warmup}"
                raise UserError(f"optim.lr_scheduler: the end of {rule}; shorten the warm-up")
            known["steps"] = end - warmup
        known["step_at"] = lambda length: in_steps("args", length) - warmup
        arguments = fit_arguments(target, config.args)
        for name in names:
            if name in known:
                arguments.setdefault(name, known[name])
        self._warmup = warmup
        self._factor: Any = partial(target, **arguments)
        if isinstance(target, type):
            self._factor = target(**arguments)
        self.factor(0)  # rejects wrong arguments now, not in the first step

    def factor(self, step: int) -> float:
        """Return the factor at optimizer step `step`, counted from 0 where its stage begins."""
        if step >= self._warmup:
            return self._factor(step - self._warmup)
        height = 1.0 - self._start
        rise = self._start + height * (step + 1) / (self._warmup + 1)
        return rise * self._factor(0)

    def step(self, step: int) -> None:
        """Set the learning rates for optimizer step `step`. Call it before that step."""
        factor = self.factor(step)
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor

    def after_validation(self, value: float) -> None:
        """Pass on a validation result, the same on every rank, to a schedule that depends on it."""
        if hasattr(self._factor, "after_validation"):
            self._factor.after_validation(value)

    def forget_best(self) -> None:
        """Have a plateau compare only later validations: its best value is of another metric."""
        if "best" in self.state_dict():
            self._factor.state["best"] = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a schedule that depends on validations; any other has none."""
        return dict(getattr(self._factor, "state", {}))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. A function of the step has none, needs none, and can replace any schedule."""
        if state and self.state_dict().keys() == state.keys():
            self._factor.state = dict(state)
