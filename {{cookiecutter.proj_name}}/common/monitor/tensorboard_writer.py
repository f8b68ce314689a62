"""TensorBoard's files."""

from collections.abc import Mapping
from textwrap import indent

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
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None
        if run.resume_step is not None:  # TensorBoard then leaves out earlier points of later steps
            purge_step = run.resume_step + 1
        self.board = SummaryWriter(run.folder / "event", purge_step=purge_step, flush_secs=10)

    def scalars(
        self,
        event: str,
        step: int,
        values: Mapping[str, float],
    ) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        group = _FIRST.get(event, event)
        summary = Summary()  # of all values: an entry each, as by `add_scalar`, takes three times as long
        for name, value in values.items():
            summary.value.add(tag=f"{group}/{name}", simple_value=float(value))
        self.board.file_writer.add_summary(summary, step)  # type: ignore[attr-defined]

    def image(
        self,
        step: int,
        tag: str,
        image: NDArray[np.uint8],
    ) -> None:
        self.board.add_image(tag, image, step, dataformats="HWC")

    def text(self, step: int, tag: str, text: str) -> None:
        self.board.add_text(tag, indent(text, "    "), step)  # in Markdown: shown as it is

    def flush(self) -> None:
        self.board.flush()

    def close(self, state: str) -> None:
        self.board.close()
