"""Saving in the background: the loop waits for a copy in memory, and a thread writes it to disk."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Annotated, Any

import torch
from loguru import logger
from pydantic import Field
from torch import Tensor

from common.base.errors import UserError
from common.base.nested import map_leaves
from common.checkpoint.file import State
from common.checkpoint.folder import CheckpointFolder
from common.config import extensible_section
from common.distributed import Rank, has_streams, main_first
from common.distributed.collectives import is_sharded, local, whole


@extensible_section
class CheckpointConfig:
    """How checkpoints are written and kept. When they are written is in `progress`."""

    keep: Annotated[int, Field(ge=0)] = 3
    """numbered checkpoints to keep, the newest ones; 0: all"""
    background: bool = True
    """write during training, from a copy in host memory (rank 0)"""
    failures: Annotated[int, Field(ge=1)] = 3
    """failed saves in a row (full disk, ...) that end the run"""


class Saver(AbstractContextManager["Saver"]):
    """Writes checkpoints, one at a time, on the main process.

    A failed save leaves the old files as they were. Training continues and the next due save tries again, until
    `failures` in a row have failed. The next call of `save`, `wait`, `check` or `finish` reports an error.

    Attributes:
        saved_step: step of the last save, also if it is still being written or failed, or of the checkpoint that was
            resumed from; None if there is none.
        at_end: functions to call when training ends, with a function that returns the signal that ended it, or 0.
    """

    def __init__(self, folder: CheckpointFolder, config: CheckpointConfig, rank: Rank) -> None:
        self.folder = folder
        self.config = config
        self.rank = rank
        self._buffers: dict[tuple[Any, ...], Tensor] = {}  # host memory, by the place of a tensor in the state
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.at_end: list[Callable[..., object]] = []
        self._pending: Future[None] | None = None
        self.saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._failed = 0

    def save(
        self,
        state: State,
        *,
        numbered: bool = False,
        best: bool = False,
    ) -> None:
        """Write `state`, now or in the background. Waits for the previous save, if it is still running.

        Every process must call this.

        Raises:
            UserError: too many saves in a row have failed.
        """
        self.wait()
        self.saved_step = state["position"]["step"]
        self._saved_at = time.monotonic()
        state = self._copy_to_host(state)
        if not self.rank.is_main:
            return
        self._pending = self._executor.submit(self.folder.save, state, numbered=numbered, best=best)
        if not self.config.background:
            self.wait()

    def is_overdue(self, seconds: float | None) -> bool:
        """Return whether the last save is more than `seconds` ago; never for None, 0 and less."""
        return seconds is not None and 0 < seconds < time.monotonic() - self._saved_at

    def wait(self) -> None:
        """Wait until nothing is being written. Raises like `save`."""
        if self._pending is None:
            return
        error = self._pending.exception()
        self._pending = None
        if error is None:
            self._failed = 0
            return
        if not isinstance(error, OSError):
            raise error
        self._failed += 1
        what = f"{error}; {self.folder.last_good}"
        if self._failed >= self.config.failures:
            raise UserError(f"saving a checkpoint failed {self._failed} times in a row: {what}")
        left = self.config.failures - self._failed
        logger.error("checkpoint not written: {}. Training continues; it ends after {} more in a row", what, left)

    def check(self) -> None:
        """Report a save that failed, without waiting. Raises like `save`."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def __exit__(self, *error: object) -> None:
        """Wait for a running write, even after an error, so that the folder can be unlocked.

        Not with several processes: after an error, all of them must end at once.
        """
        self._executor.shutdown(wait=self.rank.is_single_process)

    def finish(self, stopped_by: Callable[[], int]) -> None:
        """Wait for the last save, then call the functions in `at_end`; `stopped_by` returns the signal.

        Raises like `save`, and also if the last save failed, since the run is then incomplete.
        """
        with main_first(self.rank):  # a write, or an upload, may take longer than `dist.timeout`
            self.wait()
            for function in self.at_end:
                function(stopped_by)
        if self._failed:
            raise UserError(f"the last checkpoint could not be written; {self.folder.last_good}")

    def _copy_to_host(self, state: Any) -> Any:
        """`state` with its tensors copied to host memory, on the main process; valid until the next call.

        The memory is used again: new memory would make this as slow as `torch.save`. Sharded tensors are gathered one
        after the other; without `background`, all others stay where they are. Every process must call this.
        """
        copies: dict[tuple[Any, ...], Tensor] = {}  # two names of one tensor (tied weights) stay one in the file

        def copy_tensor(value: Any, path: tuple[Any, ...]) -> Any:
            is_copied = self.config.background or is_sharded(value)
            if not is_copied or not isinstance(value, Tensor):
                return value
            part = local(value)
            identity = (part.data_ptr(), part.device, part.dtype, value.shape, value.stride())
            value = whole(value)
            if self.rank.is_main and identity not in copies:
                asynchronous = has_streams(value.device)
                buffer = self._buffers.get(path)
                if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                    buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=asynchronous)
                    self._buffers[path] = buffer
                copies[identity] = buffer.copy_(value.detach(), non_blocking=asynchronous)
            return copies.get(identity)

        copy = map_leaves(state, copy_tensor)
        if has_streams(self.rank.device):  # one wait for all copies
            torch.accelerator.synchronize(self.rank.device)
        return copy
