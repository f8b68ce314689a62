"""The learning rate of every optimizer step: a factor of the configured rate, and a pure function of the step.

Two kinds depend on more than the step and have a state to save: `plateau`, and torch's schedulers (torch_schedule.py).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch.optim import Optimizer

from common.base.errors import UserError
from common.config import section
from common.optim import factors
from common.optim.arguments import as_arguments, check_arguments, choices
from common.optim.factors import Factor
from common.optim.torch_schedule import TorchScheduler, scheduler_class
from common.progress import EpochInterval, Interval

KINDS = ("constant", "linear", "cosine", "poly", "multistep", "exponential", "onecycle", "plateau")
_ALIASES = {
    "multisteplr": "multistep",
    "exponentiallr": "exponential",
    "polylr": "poly",
    "cosineannealinglr": "cosine",
    "warmupcosinelr": "cosine",  # warms up for lr_steps[0] when `warmup` does not say how long
}


@section
class LrSchedulerConfig:
    """How the learning rate changes. Lengths count from the start of the run, in epochs or as "100step"."""

    type: Annotated[
        str, Field(description=f"{', '.join(KINDS)}, or a path such as torch.optim.lr_scheduler.CyclicLR")
    ] = "constant"
    warmup: Annotated[
        EpochInterval, Field(description="length of the linear rise that comes first, inside the total; 0 = none")
    ] = 0
    warmup_factor: Annotated[
        float, Field(ge=0.0, le=1.0, description="factor that the rise starts from; its first step is already above it")
    ] = 0.0
    lr_gamma: Annotated[
        float, Field(gt=0.0, description="multistep, plateau: factor per drop; exponential: factor at lr_steps[0]")
    ] = 0.1
    lr_steps: Annotated[
        list[EpochInterval],
        Field(description="multistep: when to drop; exponential: the first is when lr_gamma is reached"),
    ] = field(default_factory=lambda: [50, 80])
    tmax: Annotated[
        EpochInterval, Field(description="linear, cosine, poly, onecycle: when they end; null = with the run")
    ] = None
    min_factor: Annotated[float, Field(ge=0.0, le=1.0, description="lowest factor of lr, after the warm-up")] = 0.0
    power: Annotated[float, Field(gt=0.0, description="poly: exponent")] = 0.9
    pct_start: Annotated[float, Field(gt=0.0, lt=1.0, description="onecycle: part of its length that rises")] = 0.3
    div_factor: Annotated[float, Field(ge=1.0, description="onecycle: starts at lr / div_factor")] = 25.0
    final_div_factor: Annotated[float, Field(ge=1.0, description="onecycle: ends at start / final_div_factor")] = 1e4
    patience: Annotated[int, Field(ge=0, description="plateau: validations without progress before a drop")] = 10
    threshold: Annotated[float, Field(ge=0.0, description="plateau: relative change that counts as progress")] = 1e-4
    cooldown: Annotated[int, Field(ge=0, description="plateau: validations after a drop that are not counted")] = 0
    mode: Annotated[Literal["min", "max"], Field(description="plateau: whether lower or higher is better")] = "min"
    args: Annotated[dict[str, Any], Field(description="keyword arguments of a torch scheduler given by path")] = field(
        default_factory=dict
    )

    __renamed__: ClassVar[dict[str, str]] = {
        "eta_min": "it is now min_factor, a part of lr and not a rate",
        "ema_min": "it is now min_factor, a part of lr and not a rate",
        "milestones": "lr_steps",
        "warmup_epochs": "warmup",
        "warmup_steps": 'it is now warmup, in steps when written as "100step"',
    }

    def __post_init__(self) -> None:
        """Raise `UserError` for an unknown kind, unfit arguments, or a length that cannot be read."""
        if "." in self.type or ":" in self.type:
            cls = scheduler_class(self.type)
            check_arguments(cls, self.args, ("optimizer", "last_epoch"), "type")
        elif self.kind not in KINDS:
            raise UserError(
                f"type {self.type!r} is no schedule; {choices(self.type, KINDS)} "
                f'Torch\'s own are given by path, "torch.optim.lr_scheduler.{self.type}"'
            )
        elif self.args:
            raise UserError(f"args {self.args}: type {self.type} takes none; they are for torch schedulers")
        _period("warmup", self.warmup)
        if self.tmax is not None and not _period("tmax", self.tmax):
            raise UserError(f"tmax {self.tmax}: must be above 0; null means the end of the run")
        if not self.lr_steps or not all(_period("lr_steps", length) for length in self.lr_steps):
            raise UserError(f"lr_steps {self.lr_steps}: needs at least one, and each above 0")

    @property
    def kind(self) -> str:
        """`type` without regard to case, old names translated; an import path as it is."""
        lower = self.type.lower()
        return _ALIASES.get(lower, lower)


class Schedule(ABC):
    """Sets the rate of every parameter group. `step` comes before each optimizer step, with that step's number."""

    @abstractmethod
    def step(self, step: int) -> None:
        """Set the rates for optimizer step `step`, counted from 0 over the whole run."""

    @abstractmethod
    def after_validation(self, value: float | None) -> None:
        """Take note of a validation. `value` must be the same number on every rank."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts; empty for a pure function of the step."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


class FactorSchedule(Schedule):
    """Rate = the group's rate when this was built x factor(step)."""

    def __init__(self, optimizer: Optimizer, factor: Factor) -> None:
        self.factor = factor
        self._optimizer = optimizer
        self._base = [group["lr"] for group in optimizer.param_groups]
        self._groups: list[dict[str, Any]] | None = None
        self._set: float | None = None

    def step(self, step: int) -> None:
        factor = self.factor(step)
        # Loading a state makes the optimizer a new list, with the saved rates in it.
        if factor == self._set and self._groups is self._optimizer.param_groups:
            return
        self._set, self._groups = factor, self._optimizer.param_groups
        for group, base in zip(self._groups, self._base, strict=True):
            group["lr"] = base * factor

    def after_validation(self, value: float | None) -> None:
        """Of no interest."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do, and the state of another schedule is left behind."""


class PlateauSchedule(FactorSchedule):
    """A drop when more than `patience` validations in a row brought nothing, counted like ReduceLROnPlateau's."""

    def __init__(self, optimizer: Optimizer, config: LrSchedulerConfig, ramp: Factor) -> None:
        super().__init__(optimizer, lambda step: ramp(step) * self._state["factor"])
        self._config = config
        self._state: dict[str, Any] = {"factor": 1.0, "best": None, "bad": 0, "cooldown": 0}

    def after_validation(self, value: float | None) -> None:
        """Count a validation. Raises `UserError` without a value, because the rate would then never drop."""
        if value is None:
            raise UserError("optim.lr_scheduler.type plateau: this validation gave no value; configure a metric")
        state, config = self._state, self._config
        if self._better(value, state["best"]):
            state["best"], state["bad"] = float(value), 0
        else:
            state["bad"] += 1
        if state["cooldown"] > 0:
            state["cooldown"], state["bad"] = state["cooldown"] - 1, 0
        if state["bad"] > config.patience:
            state["factor"] = max(state["factor"] * config.lr_gamma, config.min_factor)
            state["cooldown"], state["bad"] = config.cooldown, 0

    def state_dict(self) -> dict[str, Any]:
        return {"type": "plateau", **self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("type") != "plateau":
            raise _other_schedule("plateau", state)
        self._state = {key: state[key] for key in self._state}

    def _better(self, value: float, best: float | None) -> bool:
        if best is None:
            return math.isfinite(value)
        # Torch multiplies `best`, so that below 0 it takes a slightly worse value for progress.
        gain = best - value if self._config.mode == "min" else value - best
        return gain > self._config.threshold * abs(best)


class TorchSchedule(Schedule):
    """One of torch's schedulers, which counts optimizer steps after the warm-up."""

    def __init__(self, optimizer: Optimizer, config: LrSchedulerConfig, ramp: Factor, warmup: int) -> None:
        self._name, self._ramp, self._warmup = config.type, ramp, warmup
        self._optimizer = optimizer
        self._scheduler = TorchScheduler(optimizer, scheduler_class(config.type), as_arguments(config.args))

    def step(self, step: int) -> None:
        ramp = self._ramp(step)
        values = self._scheduler.values(max(0, step - self._warmup))
        for group, mine in zip(self._optimizer.param_groups, values, strict=True):
            group.update(mine)
            group["lr"] *= ramp

    def after_validation(self, value: float | None) -> None:
        self._scheduler.after_validation(value)

    def state_dict(self) -> dict[str, Any]:
        return {"type": self._name, **self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("type") != self._name:
            raise _other_schedule(self._name, state)
        self._scheduler.load_state_dict(state)


def build_schedule(
    config: LrSchedulerConfig, optimizer: Optimizer, total_steps: int | None, steps_per_epoch: int | None
) -> Schedule:
    """The configured schedule over a run of `total_steps` optimizer steps.

    None: a run without a set end, a data set without length. Raises `UserError` when the schedule needs to know.
    """
    warmup = _warmup_steps(config, steps_per_epoch)
    ramp = factors.ramp(warmup, config.warmup_factor)
    if config.kind == "plateau":
        return PlateauSchedule(optimizer, config, ramp)
    if config.kind not in KINDS:
        return TorchSchedule(optimizer, config, ramp, warmup)
    main = _main(config, warmup, total_steps, steps_per_epoch)
    return FactorSchedule(optimizer, factors.after_ramp(main, warmup, config.warmup_factor) if warmup else main)


def _main(config: LrSchedulerConfig, warmup: int, total_steps: int | None, steps_per_epoch: int | None) -> Factor:
    """The schedule proper, for steps from `warmup` on."""
    floor = config.min_factor
    if config.kind == "constant":
        return factors.constant
    if config.kind == "multistep":
        milestones = [_steps("lr_steps", length, steps_per_epoch) for length in config.lr_steps]
        return factors.multistep(milestones, config.lr_gamma, floor)
    if config.kind == "exponential":
        length = _after_warmup("lr_steps[0]", _steps("lr_steps", config.lr_steps[0], steps_per_epoch), warmup)
        return factors.exponential(warmup, length, config.lr_gamma, floor)
    length = _after_warmup(
        "tmax" if config.tmax else "tmax (the end of the run)", _end(config, total_steps, steps_per_epoch), warmup
    )
    if config.kind == "onecycle":
        start = 1.0 / config.div_factor
        return factors.onecycle(warmup, length, start, max(floor, start / config.final_div_factor), config.pct_start)
    if config.kind == "poly":
        return factors.poly(warmup, length, floor, config.power)
    return (factors.cosine if config.kind == "cosine" else factors.linear)(warmup, length, floor)


def _warmup_steps(config: LrSchedulerConfig, steps_per_epoch: int | None) -> int:
    if config.type.lower() == "warmupcosinelr" and not Interval.parse(config.warmup, "epoch"):
        return _steps("lr_steps", config.lr_steps[0], steps_per_epoch)
    return _steps("warmup", config.warmup, steps_per_epoch)


def _end(config: LrSchedulerConfig, total_steps: int | None, steps_per_epoch: int | None) -> int:
    if config.tmax is not None:
        return _steps("tmax", config.tmax, steps_per_epoch)
    if total_steps is None:
        raise UserError(
            f"optim.lr_scheduler.type {config.type} ends with the run, whose length is not known; "
            'set optim.lr_scheduler.tmax in steps, as in "10000step", or give the run progress.max_steps'
        )
    return max(1, total_steps)


def _period(key: str, length: int | float | str | None) -> Interval:
    try:
        return Interval.parse(length, "epoch")
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def _steps(key: str, length: int | float | str | None, steps_per_epoch: int | None) -> int:
    try:
        return _period(key, length).in_steps(steps_per_epoch)
    except UserError as error:
        raise UserError(f"optim.lr_scheduler.{key} {length}: {error}") from error


def _after_warmup(key: str, end: int, warmup: int) -> int:
    if end <= warmup:
        raise UserError(
            f"optim.lr_scheduler.{key} is reached at step {end}, in a warm-up of {warmup}; shorten the warm-up"
        )
    return end - warmup


def _other_schedule(name: str, state: dict[str, Any]) -> UserError:
    return UserError(
        f"optim.lr_scheduler.type {name}: the checkpoint holds the state of {state.get('type', 'one without state')}; "
        "resume with that schedule, or start anew from the weights with progress.start_epoch 0"
    )
