"""A run that consists of one stage. `common.stages` has runs of several."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from common.optim import OptimConfig
from common.optim.schedule import Schedule, build_schedule
from common.progress import Position


class WholeRun:
    """The only stage of a run.

    Args:
        config: the run's `RunConfig`, which is defined above this floor because it has stages.

    Attributes:
        number: number of the stage, from 0.
        start: optimizer steps done when the stage began.
        config: the settings that hold in the stage.
    """

    def __init__(self, config: Any, total_steps: int | None, steps_per_epoch: int | None) -> None:
        self._run, self._total, self._steps_per_epoch = config, total_steps, steps_per_epoch
        self.number, self.start, self.config = 0, 0, config

    def advance(self, at: Position) -> bool:
        """Enter the stage that is due at a position. Returns whether the stage changed."""
        return False

    def after_validation(self, value: float | None) -> None:
        """Tell the stage a validation result, which must be the same on every rank."""

    def schedule(self, optimizer: Optimizer) -> Schedule:
        """Build the schedule over the length of this stage. Raises `UserError` if it does not fit."""
        return self._schedule(self.config.optim, self.start, None, optimizer)

    def _schedule(self, config: OptimConfig, start: int, end: int | None, optimizer: Optimizer) -> Schedule:
        end = end or self._total
        steps = None if end is None else end - start
        cut = end == self._run.progress.max_steps
        length = (optimizer, steps, self._steps_per_epoch, self._run.debug.debug_mode, cut)
        return build_schedule(config.lr_scheduler, *length)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stage: nothing, if it is the only one."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the saved stage."""
