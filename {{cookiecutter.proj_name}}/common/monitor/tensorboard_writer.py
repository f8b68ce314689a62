"""TensorBoard's files."""

import time
from collections.abc import Mapping
from textwrap import indent
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.registry import WRITER_REGISTRY
from common.monitor.writer import Writer, WriterRun

# TensorBoard opens its first two groups only, and sorts capitals before small letters.
_FIRST = {"train": "Train", "val": "Val"}


@WRITER_REGISTRY.register("tensorboard")
class TensorBoardWriter(Writer):
    """Curves, pictures and texts, in the run folder's `event/`."""

    def __init__(self, run: WriterRun) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None
        if run.resume_step is not None:
            purge_step = run.resume_step + 1
        folder = str(run.folder / "event")
        self.board = SummaryWriter(folder, purge_step=purge_step, max_queue=1000)
        self.summary = Summary
        self.points: list[Any] = []
        self.step = 0
        self.measured = 0.0

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        group = _FIRST.get(event, event)
        if step != self.step:
            self.write_points()
            self.step = step
            self.measured = time.time()
        for name, value in values.items():
            point = self.summary.Value(tag=f"{group}/{name}", simple_value=value)
            self.points.append(point)

    def write_points(self) -> None:
        """Write the points of a step in one entry: each wakes up the thread that writes, which holds up the loop."""
        if self.points:
            entry = self.summary(value=self.points)
            self.board._get_file_writer().add_summary(entry, self.step, self.measured)
            self.points = []

    def image(self, step: int, tag: str, image: NDArray[np.uint8]) -> None:
        self.board.add_image(tag, image, step, dataformats="HWC")

    def text(self, step: int, tag: str, text: str) -> None:
        self.board.add_text(tag, indent(text, "    "), step)  # in Markdown: shown as it is

    def flush(self) -> None:
        self.write_points()
        self.board.flush()

    def close(self, state: str) -> None:
        self.write_points()
        self.board.close()
