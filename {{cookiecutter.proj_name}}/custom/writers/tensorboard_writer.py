"""TensorBoard's files."""

from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.registry import WRITER_REGISTRY
from common.monitor.writer import Writer, WriterRun
from custom.writers import flat, mosaic

# TensorBoard opens its first two groups only, and sorts capitals before small letters.
_FIRST = {"train": "Train", "val": "Val"}
# Sections that say where and how often things are written, which is not what runs are compared by.
_NO_COLUMNS = ("checkpoint", "dir", "monitor", "slurm")


@WRITER_REGISTRY.register("tensorboard")
class TensorBoardWriter(Writer):
    """Curves, pictures, texts, histograms and the table of settings, in the run folder.

    TensorBoard then calls the run by the folder's name. Runs of earlier versions have their files in `event/`; a resume
    adds to them.
    """

    def __init__(self, run: WriterRun) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        earlier = run.folder / "event"
        folder = earlier if earlier.is_dir() else run.folder
        purge_step = None if run.resume_step is None else run.resume_step + 1
        self.board = SummaryWriter(str(folder), purge_step=purge_step, max_queue=1000)
        # The run's row in HPARAMS, at the start: a run that is killed has one too. Without the summary that lists the
        # metrics, TensorBoard offers every curve as a column, with its last value.
        settings = {
            key: each if type(each) in (int, float, str) else str(each)
            for key, each in flat(run.config).items()
            if key.partition(".")[0] not in _NO_COLUMNS
        }
        _, start, self.hparams_end = hparams(settings, {})
        self.board._get_file_writer().add_summary(start)

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.board.add_scalar(f"{_FIRST.get(event, event)}/{name}", value, step)

    def images(self, step: int, tag: str, images: Sequence[NDArray[np.uint8]]) -> None:
        self.board.add_image(tag, mosaic(images), step, dataformats="HWC")

    def text(self, step: int, tag: str, text: str) -> None:
        self.board.add_text(tag, indent(text, "    "), step)  # in Markdown: shown as it is

    def histogram(self, step: int, tag: str, values: NDArray[Any]) -> None:
        if (finite := values[np.isfinite(values)]).size:
            self.board.add_histogram(tag, finite, step)

    def flush(self) -> None:
        self.board.flush()

    def close(self, state: str) -> None:
        if state == "finished":
            self.board._get_file_writer().add_summary(self.hparams_end)
        self.board.close()
