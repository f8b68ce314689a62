"""Count the operations of a step, and compare their rate with the peak of the device."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

from loguru import logger

from common.distributed.buffers import buffers_unchanged
from common.distributed.seed import random_state_unchanged
from common.monitor.meter import Timing
from common.progress import Position
from common.run_context import RunContext
from common.trainer import Trainer
from parts.speed.config import SpeedConfig
from parts.speed.flops import count_flops


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Add TFLOP/s and MFU to log lines, where they are known."""
    config: SpeedConfig = trainer.config.speed  # type: ignore[attr-defined]  # which this part adds
    if config.count_flops or config.peak_tflops:
        trainer.monitor.after_log.append(Speed(trainer, config.peak_tflops))
    yield


class Speed:
    """The rate of a step's operations, which are counted at the first log line of a stage.

    Args:
        peak: TFLOP/s that a device can do at most, if known.
    """

    def __init__(self, trainer: Trainer, peak: float | None) -> None:
        self.trainer = trainer
        self.peak = peak
        self.flops = 0.0  # for each sample, or item that the task counts
        self._counted: object = None  # the stage's `OptimizerStep`

    def __call__(self, at: Position, timing: Timing) -> dict[str, float]:
        """Return `tflops` and `mfu`. Every process must call this."""
        if self._counted is not self.trainer.optimizer_step:
            self._counted = self.trainer.optimizer_step
            self.flops = self._count()
        if not self.flops:
            return {}
        rate = timing.items or timing.rate
        tflops = self.flops * rate / self.trainer.rank.world_size / 1e12
        values = {"tflops": tflops}
        if self.peak:
            values["mfu"] = tflops / self.peak
        return values

    def _count(self) -> float:
        """Count the operations of the latest step's updates, forward and backward, for each sample or item.

        Weights, gradients, buffers and random generators stay as they were.
        """
        task, step, data = self.trainer.task, self.trainer.optimizer_step, self.trainer.latest_step
        assert data is not None
        batch = deepcopy(data.batches[0])
        forward = partial(task, task.update)  # past DDP, through FSDP
        gradients = {parameter: parameter.grad for parameter in task.parameters()}
        task.zero_grad()
        try:
            with random_state_unchanged(self.trainer.rank.device), buffers_unchanged(task):
                items = task.count(batch) or data.global_batch.sizes[0]
                updates = step.updates.values()
                counts = count_flops(lambda: [step.trial_loss(use, forward, batch).backward() for use in updates])
            return counts["Global"] / items if items else 0.0
        except Exception as error:  # noqa: BLE001 - if it is an error of the task, the next step reports it
            logger.info("TFLOP/s and MFU are not known, since a trial pass failed: {!r}", error)
            return 0.0
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
