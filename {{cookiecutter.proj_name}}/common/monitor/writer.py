"""Writes numbers and pictures to files: `metrics.jsonl` for programs, TensorBoard for people."""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from common.base.files import Appender, atomic_file


class Writer:
    """Writes the measurements of a run.

    `metrics.jsonl` has one JSON object on each line, with `event` first. Each attempt of a run begins with a line
    `{"event": "run", "schema": 1, "run": ..., "attempt": ..., "resume_step": ...}`; numbers are
    `{"event": "train", "step": 12, ..., "values": {"loss": 0.25}}` in full precision.

    A resume removes everything after `resume_step` from both, so that no point appears twice.
    """

    def __init__(
        self, metrics_file: Path, event: Path | None, *, run_id: str, attempt: int = 1, resume_step: int | None = None
    ) -> None:
        """
        Args:
            event: folder of TensorBoard's files; None for none.
            resume_step: optimizer steps of the checkpoint that this attempt continues from; None for a new run.
        """
        if resume_step is not None:
            _drop_after(metrics_file, resume_step)
        self._file = Appender(metrics_file)
        self._event = event
        self._board: Any = None
        self._board_pauses = False
        self._purge_step = None if resume_step is None else resume_step + 1
        self.record("run", schema=1, run=run_id, attempt=attempt, resume_step=resume_step)

    def scalars(self, event: str, step: int, values: Mapping[str, float], **where: Any) -> None:
        """Write `values` measured at optimizer step `step`; their tags in TensorBoard are `<event>/<name>`.

        Args:
            event: the source of the values: "train", "val", "eval".
            where: further fields, such as `epoch=2`; for `metrics.jsonl` only.
        """
        self.record(event, step=step, **where, values=values)

        def write(board: Any) -> None:
            for name, value in values.items():
                board.add_scalar(f"{event}/{name}", value, step)

        self._to_board(write)

    def add(self, kind: Literal["text", "histogram", "image"], step: int, tag: str, value: Any, **options: Any) -> None:
        """Write a text (Markdown), an array of numbers or a picture to TensorBoard, by its method `add_<kind>`."""
        self._to_board(lambda board: getattr(board, f"add_{kind}")(tag, value, step, **options))

    def image(self, step: int, tag: str, image: NDArray[np.uint8]) -> None:
        """Write a picture (H, W, 3), RGB, to TensorBoard."""
        self.add("image", step, tag, image, dataformats="HWC")

    def record(self, event: str, **fields: Any) -> None:
        """Write a line of plain values to `metrics.jsonl`: a checkpoint saved, the end of the run."""
        if not self._file.closed:  # once closed, the end is written; an error here would hide the original one
            self._file.write(json.dumps(plain({"event": event, **fields}), allow_nan=False) + "\n")

    def flush(self) -> None:
        """Flush everything written so far to the files. Call it with every checkpoint."""
        self._file.write("")
        self._board_pauses = False
        self._to_board(lambda board: board.flush())

    def close(self) -> None:
        """Flush and close the files; nothing can be written afterwards. Safe to call twice."""
        self._file.close()
        if self._board is not None:
            self._to_board(lambda board: board.close())
        self._event = self._board = None

    def _to_board(self, write: Callable[[Any], None]) -> None:
        """Call `write` with TensorBoard's writer. A full disk ends its thread; the next `flush` allows a new one."""
        if self._event is None or self._board_pauses:
            return
        try:
            if self._board is None:  # importing it before the first log line would delay the first step
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self._event), purge_step=self._purge_step, max_queue=1000)
                self._purge_step = None
            write(self._board)
        except (ImportError, OSError) as error:
            logger.warning("TensorBoard's files cannot be written: {}; metrics.jsonl will have the numbers", error)
            self._board, self._board_pauses = None, True


class NullWriter:
    """Accepts every call of a `Writer` and does nothing, for processes that write no files."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _drop_after(path: Path, step: int) -> None:
    """Remove the lines of later steps from a metrics file, atomically: a kill leaves the old file or the new one."""
    if not path.exists():
        return
    with path.open("rb") as lines, atomic_file(path) as file:
        for line in lines:
            with suppress(ValueError):  # cut off by a kill
                if json.loads(line).get("step", 0) <= step:
                    file.write(line.rstrip() + b"\n")


def plain(value: Any) -> Any:
    """`value` in types of JSON. Floats keep every digit: Python writes the shortest text that reads back the same.

    JSON has no NaN and Infinity, so they become strings, which Python's float() and JavaScript's Number() read.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    number = float(value)
    return number if math.isfinite(number) else json.dumps(number)
