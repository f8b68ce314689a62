"""TensorBoard's files."""

import os
import socket
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
    """Curves, pictures and texts, in the run folder's `event/`.

    Each entry is in the file when its call returns. PyTorch's SummaryWriter leaves this to a thread, and waiting for
    that thread to release Python's lock takes longer than writing.
    """

    def __init__(self, run: WriterRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        folder = run.folder / "event"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self.records = RecordWriter((folder / name).open("ab", buffering=0))
        self.event = Event
        self.summary = summary
        self.write(0, file_version="brain.Event:2")
        if run.resume_step is not None:  # TensorBoard then leaves out earlier points of later steps
            self.write(run.resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, **content: Any) -> None:
        """Append an entry."""
        event = self.event(step=step, wall_time=time.time(), **content)
        self.records.write(event.SerializeToString())

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        group = _FIRST.get(event, event)
        points = [{"tag": f"{group}/{name}", "simple_value": value} for name, value in values.items()]
        self.write(step, summary={"value": points})

    def image(self, step: int, tag: str, image: NDArray[np.uint8]) -> None:
        self.write(step, summary=self.summary.image(tag, image, dataformats="HWC"))

    def text(self, step: int, tag: str, text: str) -> None:
        self.write(step, summary=self.summary.text(tag, indent(text, "    ")))  # in Markdown: shown as it is

    def close(self, state: str) -> None:
        self.records.close()
