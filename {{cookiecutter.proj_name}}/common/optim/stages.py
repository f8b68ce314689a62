"""Stages of a run: settings that hold until a position, or until validation makes no more progress."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from common.base.context import error_context
from common.base.errors import UserError
from common.optim.factors import Plateau
from common.optim.schedule import MomentumSchedule, Schedule, build_schedule
from common.progress import Interval, Position

if TYPE_CHECKING:
    from common.task import EngineConfig

PLATEAU = "plateau"


class Stages:
    """The stage that a run is in. Without stages in the config, the whole run is one.

    Attributes:
        number: of the stage, from 0.
        start: optimizer steps done when it began.
        config: the settings in it.

    Raises:
        UserError: a stage ends before it begins, after the run, or inside an epoch though the training data change.
    """

    def __init__(self, config: "EngineConfig", total_steps: int | None, steps_per_epoch: int | None) -> None:
        self._run, self._total, self._steps_per_epoch = config, total_steps, steps_per_epoch
        self._ends: list[int | None] = []
        start, last = 0, math.inf if total_steps is None or config.debug.debug_mode else total_steps - 1
        for number, stage in enumerate(config.stages):
            is_open = stage.until in (None, PLATEAU)
            end = None if is_open else Interval.parse(stage.until, "epoch").in_steps(steps_per_epoch)
            where = f"stages[{number}].until {stage.until} is step {end}"
            if end is not None and not start < end <= last:
                raise UserError(f"{where}; it must be after step {start} and before the end of the run, {last + 1}")
            if end is not None and self._changes_data(number) and end % (steps_per_epoch or math.inf):
                raise UserError(f"{where}; other training data begin with an epoch, so it must be the end of one")
            self._ends.append(end)
            start = end or start
        self._enter(0, 0)

    def __str__(self) -> str:
        return f"stage {self.number + 1} of {len(self._ends)}"

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
        """The schedule of this stage, over its length; over the rest of the run if a plateau ends it.

        Raises `UserError` if it does not fit; in the first stage, also if one of a later stage does not.
        """
        for number in range(1, 0 if self.number else len(self._ends)):
            with error_context(lambda number=number: f"in stages[{number}]"):  # type: ignore[misc]
                self._schedule(number, max(end or 0 for end in self._ends[:number]), optimizer)
        return self._schedule(self.number, self.start, optimizer)

    def _schedule(self, number: int, start: int, optimizer: Optimizer) -> Schedule:
        end = (self._ends[number] if self._ends else None) or self._total
        steps = None if end is None else end - start
        config = self._run.in_stage(number).optim
        cut = end == self._run.progress.max_steps
        length = (optimizer, steps, self._steps_per_epoch, self._run.debug.debug_mode, cut)
        schedule = build_schedule(config.lr_scheduler, *length)
        if config.momentum_scheduler is not None:
            with error_context(lambda: "in optim.momentum_scheduler"):
                schedule.momentum = build_schedule(config.momentum_scheduler, *length, kind=MomentumSchedule)
        return schedule

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"number": self.number, "start": self.start, "plateau": self._plateau.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in a saved stage."""
        if state["number"] >= len(self._run.stages):
            raise UserError(f"the checkpoint is in stage {state['number'] + 1}, but there are only {len(self._ends)}")
        self._enter(state["number"], state["start"])
        self._plateau.state = dict(state["plateau"])

    def _enter(self, number: int, start: int) -> None:
        self.number, self.start, self.config = number, start, self._run.in_stage(number)
        schedule = self.config.optim.lr_scheduler
        self._plateau = Plateau(0.5, 0.0, schedule.patience, schedule.threshold, 0, self._run.best_mode)

    def _is_over(self, at: Position) -> bool:
        if self.number + 1 >= len(self._ends) or (at.sample and self._changes_data(self.number)):
            return False
        end = self._ends[self.number]
        return self._plateau(0) < 1.0 if end is None else at.step >= end

    def _changes_data(self, number: int) -> bool:
        """Whether the training data change at the end of a stage."""
        return any(stage.dataset for stage in self._run.stages[number : number + 2])
