"""Saving in the background: the loop waits for a copy in memory, a thread writes it to the disk."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from loguru import logger
from pydantic import Field
from torch import Tensor

from common.base.errors import UserError
from common.checkpoint.file import map_leaves
from common.checkpoint.folder import CheckpointFolder
from common.checkpoint.shards import write_shards
from common.config import section
from common.distributed import Rank
from common.progress import StepInterval

_ALONE = Rank()


@section
class CheckpointConfig:
    """How checkpoints are written and kept. When they are written is in `progress`."""

    keep: Annotated[int, Field(ge=0, description="numbered checkpoints to keep, the newest ones; 0: all")] = 3
    keep_every: Annotated[
        StepInterval,
        Field(description='numbered checkpoints at multiples of this are kept for good; steps, or "10epoch"'),
    ] = -1
    background: Annotated[
        bool,
        Field(description="write while training goes on; costs host memory for one copy of the state. Not with fsdp"),
    ] = True
    failures: Annotated[
        int, Field(ge=1, description="failed saves in a row (full disk, ...) that end the run; 1: the first one does")
    ] = 3


class Saver:
    """Writes checkpoints, one at a time.

    A save that fails leaves the old files as they were. Training continues and the next due save tries again, until
    `failures` in a row have failed. Errors of the background surface at the next call of any method.

    Sharded tensors (FSDP) are written at once, by all processes; the main process then writes the file that refers to
    them.

    Attributes:
        saved_step: of the newest checkpoint, be it of this process or the one that it continues from; None: no such.
    """

    def __init__(self, folder: CheckpointFolder, config: CheckpointConfig, rank: Rank = _ALONE) -> None:
        self.folder = folder
        self.config = config
        self.rank = rank
        self.saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._stage = Stage()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failed = 0

    def save(self, state: Mapping[str, Any], *, step: int, numbered: bool = False, best: bool = False) -> None:
        """Write `state`, now or in the background. Waits for the save before it, if that still runs.

        Every process must call this.

        Raises:
            UserError: too many saves in a row have failed.
        """
        self.wait()
        self.saved_step, self._saved_at = step, time.monotonic()
        start = time.perf_counter()
        try:
            state = write_shards(state, self.folder.folder, step, self.rank)
        except OSError as error:
            self._error = error
            self.check()
            return
        if not self.rank.is_main:
            self._failed = 0
            return
        number = step if numbered else None
        if not self.config.background:
            self._write(state, step, number, best, start)
            self.check()
            return
        copy = self._stage.copy(state)
        self._thread = threading.Thread(target=self._write, args=(copy, step, number, best, start), name="checkpoint")
        self._thread.start()

    def is_overdue(self, seconds: float | None) -> bool:
        """Whether the last save is more than `seconds` ago; never for None, 0 and less."""
        return seconds is not None and 0 < seconds < time.monotonic() - self._saved_at

    def wait(self) -> None:
        """Until nothing is being written. Raises like `save`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around training: afterwards nothing is being written, even after an error, and the folder can be unlocked.

        With several processes an error does not wait, since all of them must end.
        """
        try:
            yield
        finally:
            if self.rank.is_alone and self._thread is not None:
                self._thread.join()

    def finish(self) -> None:
        """Wait. Raises like `save`, and also when the last save failed, since the run is then not complete."""
        self.wait()
        if self._failed:
            raise UserError(f"the last checkpoint could not be written; {self.folder.folder} has the ones before it")

    def check(self) -> None:
        """Report a save that failed, without waiting. Raises like `save`."""
        error, self._error = self._error, None
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        self._failed += 1
        what = f"{error.strerror or error} ({error.filename or self.folder.folder})"
        kept = (
            f"the last good checkpoint is {self.folder.latest}" if self.folder.latest.is_file() else "there is none yet"
        )
        if self._failed >= self.config.failures:
            raise UserError(f"no checkpoint could be written, {self._failed} times in a row: {what}; {kept}")
        left = self.config.failures - self._failed
        logger.error("checkpoint not written: {}; {}. Training continues; {} more failures end it", what, kept, left)

    def _write(self, state: Mapping[str, Any], step: int, number: int | None, best: bool, start: float) -> None:
        try:
            paths = self.folder.save(state, step=number, best=best)
        except BaseException as error:  # noqa: BLE001 - from a thread it would be lost; `check` raises it
            self._error = error
            return
        self._failed = 0
        names = ", ".join(path.name for path in paths)
        logger.info("saved {} (step {}, {:.2f} s)", names, step, time.perf_counter() - start)


class Stage:
    """Copies a state to host memory that it keeps: after the first time, nothing is allocated."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def copy(self, state: Any) -> Any:
        """`state` with copies of all tensors, on the CPU. The copy is good until the next call."""
        used: dict[tuple[Any, ...], Tensor] = {}
        seen: dict[tuple[Any, ...], Tensor] = {}

        def copied(value: Any, path: tuple[Any, ...]) -> Any:
            if not isinstance(value, Tensor) or value.is_meta:
                return value
            # Two names of one tensor (tied weights) stay one tensor in the file.
            identity = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
            if value.numel() and identity in seen:
                return seen[identity]
            buffer = self._buffers.get(path)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                pinned = value.device.type == "cuda"
                buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
            buffer.copy_(value.detach(), non_blocking=True)
            used[path] = seen[identity] = buffer
            return buffer

        copy = map_leaves(state, copied)
        self._buffers = used
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copy
