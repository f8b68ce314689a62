"""What a task shows of itself at a log line."""

from collections.abc import Mapping
from textwrap import indent
from typing import Any

import numpy as np
from loguru import logger
from numpy.typing import ArrayLike
from torch import Tensor

from common.monitor.pictures import to_rgb
from common.monitor.writer import NullWriter, Writer


class Show:
    """Writes to the log, to metrics.jsonl and to TensorBoard, under `task/`. On ranks above 0, it does nothing."""

    def __init__(self, writer: Writer | NullWriter, step: int) -> None:
        self._writer, self._step = writer, step

    def scalars(self, values: Mapping[str, float | Tensor]) -> None:
        """Numbers by name, for metrics.jsonl and TensorBoard. Reading a tensor waits for its device."""
        self._writer.scalars("task", self._step, {name: float(value) for name, value in values.items()})

    def text(self, name: str, text: str) -> None:
        """A text of any length, for the log and TensorBoard."""
        if isinstance(self._writer, Writer):
            logger.info("{}:\n{}", name, text)
        self._writer.add("text", self._step, f"task/{name}", indent(text, "    "))  # in Markdown: shown as it is

    def histogram(self, name: str, values: Any) -> None:
        """The distribution of numbers, a tensor or array of any shape, for TensorBoard."""
        if isinstance(values, Tensor):
            values = values.detach().float().cpu().numpy()
        self._writer.add("histogram", self._step, f"task/{name}", np.asarray(values))

    def image(self, name: str, image: ArrayLike) -> None:
        """A picture (H, W), (H, W, 1) or (H, W, 3), floats from 0 to 1 or whole numbers to 255, for TensorBoard."""
        self._writer.image(self._step, f"task/{name}", to_rgb(image))
