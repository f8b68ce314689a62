"""Numbers and pictures to files: `metrics.jsonl` for programs, TensorBoard for eyes."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from common.base.files import Appender, atomic_file

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SCHEMA = 1
# JSON has no such numbers. These words are valid JSON, and Python's float() and JavaScript's Number() read them.
_WORDS = {"NaN", "Infinity", "-Infinity"}


class Writer:
    """Writes what a run measures.

    `metrics.jsonl` has one JSON object on each line, with `event` first. Each attempt of a run begins with a line
    `{"event": "run", "schema": 1, "run": ..., "attempt": ..., "resume_step": ...}`; numbers are
    `{"event": "train", "step": 12, ..., "values": {"loss": 0.25}}` in full precision. `read_metrics` reads it.

    A resume removes everything after `resume_step` from both, so that no point is there twice.
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
        self._resume_step = resume_step
        self._board: SummaryWriter | None = None
        self._pausing = False  # TensorBoard, see `_board_may_fail`
        self.record("run", schema=SCHEMA, run=run_id, attempt=attempt, resume_step=resume_step)

    def scalars(self, event: str, step: int, values: Mapping[str, float], **where: Any) -> None:
        """Write `values` measured at optimizer step `step`; in TensorBoard they are called `<event>/<name>`.

        Args:
            event: what measured them: "train", "val", "eval".
            where: more about the place, as `epoch=2`; for `metrics.jsonl` only.
        """
        self.record(event, step=step, **where, values=values)
        board = self._tensorboard()
        if board is not None and board.file_writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # As `add_scalar` does it, but all in one event. (`add_scalars` opens a file for each name, and a resume
            # does not purge those.)
            scalars = [Summary.Value(tag=f"{event}/{name}", simple_value=value) for name, value in values.items()]
            with self._board_may_fail():
                board.file_writer.add_summary(Summary(value=scalars), step)

    def image(self, step: int, tag: str, image: NDArray[np.uint8]) -> None:
        """Write a picture (H, W, 3), RGB, to TensorBoard."""
        if (board := self._tensorboard()) is not None:
            with self._board_may_fail():
                board.add_image(tag, image, step, dataformats="HWC")

    def record(self, event: str, **fields: Any) -> None:
        """Write a line of plain values to `metrics.jsonl`: a checkpoint saved, the end of the run."""
        if self._file.closed:  # the end is written; an error after it must not be hidden by one of ours
            return
        self._file.write(json.dumps(plain({"event": event, **fields}), allow_nan=False) + "\n")

    def flush(self) -> None:
        """Bring everything written so far to the files. Call it with every checkpoint."""
        self._file.write("")
        if self._board is not None:
            with self._board_may_fail():
                self._board.flush()
        else:
            self._pausing = False

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            with self._board_may_fail():
                self._board.close()
            self._board = None
        self._event = None

    @contextmanager
    def _board_may_fail(self) -> Iterator[None]:
        """TensorBoard's thread ends when it cannot write, on a full disk, say. A new file is tried at the next save."""
        try:
            yield
        except OSError as error:
            logger.warning("TensorBoard's files cannot be written: {}; metrics.jsonl will have the numbers", error)
            self._board, self._resume_step, self._pausing = None, None, True

    def _tensorboard(self) -> "SummaryWriter | None":
        """TensorBoard's writer, made when it is first needed: importing it would delay the first step."""
        if self._board is None and self._event is not None and not self._pausing:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                advice = "pip install tensorboard, or set monitor.tensorboard: false"
                logger.warning("no TensorBoard files ({}); {}", error, advice)
                self._event = None
                return None
            purge = None if self._resume_step is None else self._resume_step + 1
            with self._board_may_fail():
                self._board = SummaryWriter(str(self._event), purge_step=purge, max_queue=1000)
        return self._board


class NullWriter:
    """A `Writer` that writes nothing, for every process but the main one."""

    def scalars(self, event: str, step: int, values: Mapping[str, float], **where: Any) -> None:
        pass

    def image(self, step: int, tag: str, image: NDArray[np.uint8]) -> None:
        pass

    def record(self, event: str, **fields: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` as dictionaries; not-a-number and infinity are floats again.

    A last line that was cut off by a kill is left out.
    """
    return [_numbers(entry) for _, entry in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = json.loads(line)
            except ValueError:
                if not line.endswith("\n"):  # the one that was being written when the process was killed
                    return
                logger.warning("{}:{} is not JSON; it is left out", path, number)
                continue
            yield line, entry


def _drop_after(path: Path, step: int) -> None:
    """Take the lines of later steps out of a metrics file, in one move: a kill leaves the old file or the new one."""
    if not path.exists():
        return
    with atomic_file(path) as file:
        for line, entry in _lines(path):
            if entry.get("step", 0) <= step:
                file.write((line if line.endswith("\n") else line + "\n").encode())


def plain(value: Any) -> Any:
    """`value` as JSON has it. Floats keep every digit: Python writes the shortest text that reads back the same."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and value in _WORDS else value
