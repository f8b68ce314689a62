"""TensorBoard's files."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from textwrap import indent
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.base.nested import flat
from common.config.registry import WRITER_REGISTRY
from common.monitor.pictures import mosaic
from common.monitor.writer import Writer, WriterRun

# TensorBoard opens its first two groups only, and sorts capitals before small letters.
_FIRST = {"train": "Train", "val": "Val"}
# Sections that say where and how often things are written, which is not what runs are compared by.
_NO_COLUMNS = ("checkpoint", "dir", "monitor", "slurm")
_SHOWN = 5  # settings that HPARAMS shows until others are ticked
_report_error = threading.excepthook


def _report_unless_known(error: threading.ExceptHookArgs) -> None:
    """TensorBoard's own thread ends on a full disk; the next entry raises its error again, and that is logged."""
    if not (isinstance(error.exc_value, OSError) and type(error.thread).__module__.startswith("tensorboard.")):
        _report_error(error)


threading.excepthook = _report_unless_known


@WRITER_REGISTRY.register("tensorboard")
class TensorBoardWriter(Writer):
    """Curves, pictures, texts, histograms and the table of settings, in the run folder's `event/`.

    Runs of some earlier versions have their files in the run folder itself; a resume adds to them.
    """

    def __init__(self, run: WriterRun) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = run.folder if any(run.folder.glob("events.out.tfevents.*")) else run.folder / "event"
        purge_step = None if run.resume_step is None else run.resume_step + 1
        self.board = SummaryWriter(str(folder), purge_step=purge_step, max_queue=1000)
        # The run's row in HPARAMS, at the start: a run that is killed has one too.
        self.settings = {
            key: value if type(value) in (int, float, str) else str(value)
            for key, value in flat(run.config).items()
            if key.partition(".")[0] not in _NO_COLUMNS
        }
        _, start, self.hparams_end = hparams(self.settings, {})
        self.has_columns = False
        self.summary, self.points, self.step, self.measured = Summary, list[Any](), 0, 0.0
        self.board._get_file_writer().add_summary(start)

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        if event == "val" and not self.has_columns:
            self.add_columns(values)
        group = _FIRST.get(event, event)
        if step != self.step:
            self.write_points()
            self.step, self.measured = step, time.time()
        self.points += [self.summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in values.items()]

    def write_points(self) -> None:
        """Write the points of a step in one entry: each wakes up the thread that writes, which holds up the loop."""
        if self.points:
            self.board._get_file_writer().add_summary(self.summary(value=self.points), self.step, self.measured)
            self.points = []

    def add_columns(self, results: Iterable[str]) -> None:
        """Say what HPARAMS shows: learning rates and model first; the best and last values of these results."""
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard.summary import hparams

        tags = dict.fromkeys((f"{group}/{name}" for group in ("best", "Val") for name in results), 0.0)
        summary, _, _ = hparams(self.settings, tags)
        data = summary.value[0].metadata.plugin_data
        columns = HParamsPluginData.FromString(data.content)
        rates = [key for key in self.settings if key.endswith(".lr")]
        model = [key for key, value in self.settings.items() if key.startswith("model.") and not isinstance(value, str)]
        first = [*rates, *model][:_SHOWN]
        for info in columns.experiment.hparam_infos:
            info.differs = info.name in first  # TensorBoard sorts by this, then by name
        data.content = columns.SerializeToString()
        self.board._get_file_writer().add_summary(summary)
        self.has_columns = True

    def images(self, step: int, tag: str, images: Sequence[NDArray[np.uint8]]) -> None:
        self.board.add_image(tag, mosaic(images), step, dataformats="HWC")

    def text(self, step: int, tag: str, text: str) -> None:
        self.board.add_text(tag, indent(text, "    "), step)  # in Markdown: shown as it is

    def histogram(self, step: int, tag: str, values: NDArray[Any]) -> None:
        if (finite := values[np.isfinite(values)]).size:
            self.board.add_histogram(tag, finite, step)

    def flush(self) -> None:
        self.write_points()
        self.board.flush()

    def close(self, state: str) -> None:
        self.write_points()
        if state == "finished":
            self.board._get_file_writer().add_summary(self.hparams_end)
        self.board.close()
