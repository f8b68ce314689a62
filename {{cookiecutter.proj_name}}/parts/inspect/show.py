"""What a task gets to show things with."""

from collections.abc import Mapping

from loguru import logger
from numpy.typing import ArrayLike
from torch import Tensor

from common.base.parts import required
from common.trainer import Trainer


class Show:
    """Writes to the log, to metrics.jsonl and with the writers, under `task/`. On ranks above 0, it does nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._recorder = trainer.monitor.recorder

    def scalars(self, values: Mapping[str, float | Tensor]) -> None:
        """Numbers by name, for metrics.jsonl and curves. Reading a tensor waits for its device."""
        numbers = {}
        for name, value in values.items():
            numbers[name] = float(value)
        self._trainer.monitor.record("task", self._trainer.at, numbers)

    def text(self, name: str, text: str) -> None:
        """Show a text of any length in the log and the writers."""
        if self._trainer.rank.is_main:
            logger.info("{}:\n{}", name, text)
        self._recorder.write("text", self._trainer.at.step, f"task/{name}", text)

    def image(self, name: str, image: ArrayLike) -> None:
        """Show a picture (H, W), (H, W, 1) or (H, W, 3), floats from 0 to 1 or integers to 255, in the writers."""
        pixels = required("pictures", "draw", "Show.image").to_rgb(image)
        self._recorder.write("image", self._trainer.at.step, f"task/{name}", pixels)
