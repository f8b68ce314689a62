"""Numbers, texts and pictures that a task logs."""

from collections.abc import Mapping

from loguru import logger
from numpy.typing import ArrayLike
from torch import Tensor

from common.base.parts import required
from common.monitor.writer import NullRecorder, Recorder


class Show:
    """Writes to the log, to metrics.jsonl and with the writers, under `task/`. On ranks above 0, it does nothing."""

    def __init__(self, recorder: Recorder | NullRecorder, step: int) -> None:
        self._recorder = recorder
        self._step = step

    def scalars(self, values: Mapping[str, float | Tensor]) -> None:
        """Numbers by name, for metrics.jsonl and curves. Reading a tensor waits for its device."""
        self._recorder.scalars("task", self._step, {name: float(value) for name, value in values.items()})

    def text(self, name: str, text: str) -> None:
        """Show a text of any length in the log and the writers."""
        if isinstance(self._recorder, Recorder):
            logger.info("{}:\n{}", name, text)
        self._recorder.write("text", self._step, f"task/{name}", text)

    def image(self, name: str, image: ArrayLike) -> None:
        """Show a picture (H, W), (H, W, 1) or (H, W, 3), floats from 0 to 1 or integers to 255, in the writers."""
        pixels = required("pictures", "draw", "Show.image").to_rgb(image)
        self._recorder.write("image", self._step, f"task/{name}", pixels)
