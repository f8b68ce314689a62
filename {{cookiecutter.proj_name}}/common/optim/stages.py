"""Stages of a run: settings that hold until a position, or until validation makes no more progress."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from torch.optim import Optimizer

from common.base.context import error_context
from common.base.errors import UserError
from common.config import Problem, section
from common.optim.factors import Plateau
from common.optim.schedule import Schedule, build_schedule
from common.progress import Interval, Position

if TYPE_CHECKING:
    from common.task import EngineConfig

PLATEAU = "plateau"


@section
class StageConfig:
    """A stage of training: its keys are laid over those of the run, not over those of the stage before it."""

    until: Annotated[
        int | float | str | None,
        Field(description='where in the run it ends: epochs, "2000step", or plateau; null: with the run'),
    ] = None
    freeze: Annotated[list[str], Field(description="not trained, besides prepare.freeze")] = field(default_factory=list)
    optim: Annotated[dict[str, Any], Field(description="keys of optim")] = field(default_factory=dict)
    lr_scheduler: Annotated[
        dict[str, Any], Field(description="keys of optim.lr_scheduler; lengths count from the start of the stage")
    ] = field(default_factory=dict)
    loss: Annotated[dict[str, Any], Field(description="weights: {CrossEntropyLoss: {weight: 0.5}}")] = field(
        default_factory=dict
    )
    dataset: Annotated[dict[str, Any], Field(description="train: keys of dataset.train")] = field(default_factory=dict)

    def problems(self) -> Iterator[Problem]:
        """An end that is none, and keys that cannot change in the course of a run."""
        try:
            if self.until not in (None, PLATEAU) and not Interval.parse(self.until, "epoch"):
                raise UserError
        except UserError:
            yield Problem("until", self.until, 'must be a number of epochs above 0, "2000step" or plateau')
        if self.lr_scheduler and "lr_scheduler" in self.optim:
            yield Problem("optim.lr_scheduler", self.optim["lr_scheduler"], "is lr_scheduler, which is there too")
        fixed = [f"optim.{name}" for name in ("accumulate", "ema") if name in self.optim]
        fixed += [f"dataset.{name}" for name in self.dataset if name != "train"]
        for name, part in self.loss.items():
            keys = part if isinstance(part, Mapping) else {"": part}
            fixed += [f"loss.{name}.{key}".rstrip(".") for key in keys if key != "weight"]
        for key in fixed:
            hint = "a stage sets freeze, optim, lr_scheduler, loss.<name>.weight and dataset.train"
            yield Problem(key, "", "cannot change in the course of a run", hint)

    def layers(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The plain values of the run's config, which are changed, and those of this stage to lay over them."""
        optim = self.optim | ({"lr_scheduler": self.lr_scheduler} if self.lr_scheduler else {})
        below = values["optim"]
        for part, over, key in (below, optim, "optim_type"), (below["lr_scheduler"], self.lr_scheduler, "type"):
            if over.get(key, part[key]) != part[key]:
                part["args"] = {}  # those of another optimizer or schedule
        freeze = [*values["prepare"]["freeze"], *self.freeze]
        over = {"optim": optim, "loss": self.loss, "dataset": self.dataset, "prepare": {"freeze": freeze}}
        return {**values, "stages": []}, {name: part for name, part in over.items() if part}


class Stages:
    """The stage that a run is in. Without stages in the config, the whole run is one.

    Attributes:
        number: of the stage, from 0.
        start: optimizer steps done when it began.
        config: the settings in it.

    Raises:
        UserError: a stage does not end after the one before it and before the run, or inside an epoch if the training
            data change there; or its schedule does not fit its length.
    """

    def __init__(self, config: "EngineConfig", total_steps: int | None, steps_per_epoch: int | None) -> None:
        self._run, self._total, self._steps_per_epoch = config, total_steps, steps_per_epoch
        self._ends: list[int | None] = []
        start = 0
        for number, stage in enumerate(config.stages):
            with error_context(lambda number=number: f"in stages[{number}].until"):  # type: ignore[misc]
                at_plateau = stage.until in (None, PLATEAU)
                end = None if at_plateau else Interval.parse(stage.until, "epoch").in_steps(steps_per_epoch)
                if end is not None and not start < end < (total_steps or math.inf):
                    reach = f"must be after step {start} and before the end of the run, step {total_steps}"
                    raise UserError(f"{stage.until} is step {end}, and {reach}")
                if end is not None and self._has_new_data(number) and end % (steps_per_epoch or end + 1):
                    raise UserError(f"{stage.until} is step {end}; new training data begin with an epoch")
            self._ends.append(end)
            start = end or start
        self._enter(0, 0)

    def _enter(self, number: int, start: int) -> None:
        self.number, self.start, self.config = number, start, self._run.in_stage(number)
        schedule = self.config.optim.lr_scheduler
        self._plateau = Plateau(0.5, 0.0, schedule.patience, schedule.threshold, 0, self._run.best_mode)

    def __str__(self) -> str:
        return f"stage {self.number + 1} of {len(self._run.stages)}"

    def advance(self, at: Position) -> bool:
        """Go on to the stage that is due at a position. Returns whether it is another one."""
        before = self.number
        while self._is_over(at):
            self._enter(self.number + 1, at.step)
        return self.number != before

    def after_validation(self, value: float | None) -> None:
        """Pass on a validation result, the same on every rank."""
        if self._run.stages and self._run.stages[self.number].until == PLATEAU:
            self._plateau.after_validation(value)

    def schedule(self, optimizer: Optimizer) -> Schedule:
        """The schedule of the stage, over its own length; to the end of the run if it ends by a plateau."""
        end = self._ends[self.number] if self._ends else None
        end = self._total if end is None else end
        steps = None if end is None else end - self.start
        return build_schedule(self.config.optim.lr_scheduler, optimizer, steps, self._steps_per_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"number": self.number, "start": self.start, "plateau": self._plateau.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in a saved stage."""
        if state["number"] >= max(1, len(self._run.stages)):
            raise UserError(f"stages: the checkpoint is in stage {state['number'] + 1}; there are fewer now")
        self._enter(state["number"], state["start"])
        self._plateau.load_state_dict(state["plateau"])

    def _is_over(self, at: Position) -> bool:
        if self.number + 1 >= len(self._run.stages) or (at.sample and self._has_new_data(self.number)):
            return False
        end = self._ends[self.number]
        return self._plateau(0) < 1.0 if end is None else at.step >= end

    def _has_new_data(self, number: int) -> bool:
        """Whether the stage after `number` has other training data."""
        return any(stage.dataset for stage in self._run.stages[number : number + 2])
