"""The seat `stage` of the training loop: the settings in force. Here those of the whole run; parts may change them."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch.optim import Optimizer

from common.base.errors import UserError
from common.base.parts import needs_part, part
from common.optim.schedule import Schedule


class WholeRun:
    """The only stage of a run: the empty seat.

    Args:
        config: the run's `RunConfig` (Any: common/settings.py is a layer above).

    Attributes:
        number: number of the stage, from 0.
        start: optimizer steps done when the stage began.
        config: the settings that hold in the stage.
        changes: whether the settings change during the run; if so, the loop calls `enter_if_due`.
    """

    changes = False

    def __init__(
        self,
        config: Any,
        total_steps: int | None,
        steps_per_epoch: int | None,
    ) -> None:
        self._total = total_steps
        self._steps_per_epoch = steps_per_epoch
        self.number = 0
        self.start = 0
        self.config = config

    def enter_if_due(self, trainer: Any) -> None:
        """Enter the next stage of a `Trainer` if it is due."""

    def after_validation(self, value: float) -> None:
        """Tell the stage a validation result, which must be the same on every rank."""

    def forget_best(self) -> None:
        """Compare only later validations: the best value is of another metric."""

    def schedule(self, optimizer: Optimizer) -> Schedule:
        """Build the schedule over the length of this stage. Raises `UserError` if it does not fit."""
        return Schedule(
            self.config.optim.lr_scheduler,
            optimizer,
            self._total,
            self._steps_per_epoch,
            mode=self.config.best_mode,
            cut=self.config.debug.debug_mode or self._total == self.config.progress.max_steps,
        )

    def resume(self, trainer: Any, state: Mapping[str, Any]) -> None:
        """Continue in the stage of a checkpoint with this state, before the rest of it is restored."""


Config = TypeVar("Config")


def in_stage(config: Config, number: int) -> Config:
    """Return the settings of a run that hold in a stage, counted from 0."""
    stages = part("stages", "stages")
    if stages is not None:
        return stages.settings_in(config, number)
    if number:
        raise UserError(f"the checkpoint is in stage {number + 1}, which {needs_part('stages')}")
    return config
