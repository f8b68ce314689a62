"""Progress reports of a run: log lines and numbers. Only the main process writes them."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from typing import Annotated, Any, Literal

import torch
from loguru import logger
from pydantic import Field
from torch import Tensor
from tqdm import tqdm

from common.base.files import warn_on_oserror
from common.base.text import label
from common.config import dump, section
from common.config.registry import WRITER_REGISTRY, Registered
from common.distributed import Rank, gather_objects, max_over_ranks
from common.monitor.line import current_epoch, evaluation_line, position, train_line
from common.monitor.meter import Meter, Timing, peak_memory
from common.monitor.result import SplitResult
from common.monitor.writer import NullRecorder, Recorder, WriterRun, drop_duplicate_loss
from common.optim.groups import learning_rates
from common.progress import Position
from common.run.folder import OpenRun
from common.run.record import environment_text
from common.run.status import State, write_status

# Log records show the line that called the monitor, not a line of this file.
_log = logger.opt(depth=1)

AtLogLine = Callable[[Position, Timing], Mapping[str, float] | None]


@section
class MonitorConfig:
    """Logging and metrics."""

    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """lowest level of log records that are kept"""
    smooth: Annotated[int, Field(ge=1)] = 20
    """steps over which the log line's losses are averaged"""
    writers: Annotated[list[str | dict[str, Any]], Registered(WRITER_REGISTRY)] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """where curves go, names or {type: ...} with settings; see docs/monitor.md"""


class Monitor:
    """Writes lines to the log, numbers to files; holds the meter and the clock.

    Args:
        run: the open run folder, in the main process; None in the others, which then write nothing.
        resume_step: optimizer steps of the checkpoint that this run continues from; later entries are removed.
        values: the whole config as plain values, for the writers.

    Attributes:
        after_step: functions to call after each optimizer step; add your own.
        after_log: functions to call at each log line, with the position and the times since the last one. What they
            return, numbers or None, is shown and recorded with the speeds.
        start: optimizer steps done when training began; None before.
        step: optimizer steps done now.
        unit: what the task counts.
        texts: written first by each writer, by tag; add your own before training.
    """

    def __init__(
        self,
        config: MonitorConfig,
        rank: Rank,
        run: OpenRun | None,
        *,
        resume_step: int | None,
        values: Mapping[str, Any],
    ) -> None:
        self.meter = Meter(config.smooth, partial(gather_objects, rank=rank))
        self.clock = self.meter.clock
        self.after_step: list[Callable[[], object]] = []
        self.after_log: list[AtLogLine] = []
        self.start: int | None = None
        self.step: int | None = None
        self._rank = rank
        self._run = run
        self.unit = "items"
        self.texts: dict[str, str] = {}
        self._total_steps: int | None = None  # of the run, where known
        self._total_epochs: int | None = None
        self._recording = threading.Lock()  # another thread records the failure of another process
        self._has_ended = False
        self.bar: tqdm[Any] = tqdm(disable=True)
        self.recorder: Recorder | NullRecorder = NullRecorder()  # until training begins
        self._make_recorder: Callable[[], Recorder | NullRecorder] = NullRecorder
        if run is not None:
            folder = run.folder
            self.texts = {"run/config": dump(values), "run/environment": environment_text(run.record)}
            about = WriterRun(folder.root, folder.name, run.id, values, resume_step, run.attempt)
            self._make_recorder = partial(Recorder, folder.metrics_file, about, config.writers, self.texts)
            self._status("running", None)

    @contextmanager
    def training(
        self,
        at: Position,
        total_steps: int | None,
        epochs: int | None,
    ) -> Iterator[None]:
        """Wraps the training loop: starts the clock, shows the progress bar. Unknown totals are None."""
        self._total_steps = total_steps
        self._total_epochs = epochs
        self.start = self.step = at.step
        hidden = None  # if this is not a terminal
        if not self._rank.is_main or os.environ.get("TQDM_DISABLE"):
            hidden = True
        self.bar = tqdm(
            total=total_steps,
            initial=at.step,
            unit="step",
            dynamic_ncols=True,
            leave=False,
            disable=hidden,
        )
        self.clock.start()
        try:
            yield
        finally:
            self.bar.close()
            self.recorder.flush()

    def begin(self) -> None:
        """Begin to record, when nothing can refuse this attempt any more: entries of later steps are removed."""
        self.recorder = self._make_recorder()
        self._status("running", self.step)

    def step_done(self, at: Position, samples: int) -> None:
        """Count an optimizer step on `samples` samples, of all processes."""
        self.clock.step_done(samples)
        self.step = at.step
        if not self.bar.disable:
            self.bar.desc = f"epoch {current_epoch(at)}: "
            self.bar.update()
        for call in tuple(self.after_step):
            call()

    def train(
        self,
        at: Position,
        optimizer: torch.optim.Optimizer,
        grad_norm: Tensor,
        metrics: Mapping[str, float],
        skipped: tuple[int, int],
    ) -> None:
        """Write the log line of training and its scalars. Waits for the device; every process must call it.

        Args:
            skipped: steps that loss scaling skipped, and of how many, since the last log line.
        """
        losses = self.meter.read()
        others = {**metrics, "grad_norm": float(grad_norm)}
        rates = {f"lr_{name}": rate for name, rate in learning_rates(optimizer).items()}
        if len(rates) == 1:
            rates = {"lr": min(rates.values())}
        steps_left = None
        if self._total_steps is not None:
            steps_left = self._total_steps - at.step
        timing = self.clock.read(steps_left)
        # Separate from the others, since these differ from run to run.
        speed: dict[str, float] = {
            "step_seconds": timing.step,
            "data_share": timing.data,
            "samples_per_second": timing.rate,
            "memory_bytes": max_over_ranks(peak_memory(self._rank.device), self._rank),
        }
        if timing.items:
            speed[f"{self.unit}_per_second"] = timing.items
        for call in self.after_log:
            speed |= call(at, timing) or {}
        where = position(at, self._total_steps, self._total_epochs)
        line = train_line(where, losses, rates, others, speed, timing.eta, skipped)
        _log.info("{}", line)
        if skipped[0]:
            others["skipped"] = skipped[0]
        self.record("train", at, losses.raw | others | rates)
        self.record("speed", at, speed)
        self.clock.reset()

    def record(
        self,
        event: str,
        at: Position,
        values: Mapping[str, float],
        **fields: Any,
    ) -> None:
        """Write numbers to `metrics.jsonl` and the writers."""
        self.recorder.record(event, step=at.step, epoch=current_epoch(at), **fields, values=values)
        self.recorder.write("scalars", event, at.step, drop_duplicate_loss(values))

    def evaluation(
        self,
        split: str,
        at: Position,
        result: SplitResult,
        key: str = "",
        *,
        best: bool = False,
    ) -> None:
        """Write a line for each set of the `split` data, and the scalars of all sets.

        Args:
            key: the value that decides about the best checkpoint.
        """
        where = position(at, self._total_steps, self._total_epochs)
        for name, measured in result.sets.items():
            decides = best and key.removeprefix(f"{name}.") in measured.values
            values = drop_duplicate_loss(measured.values)
            line = evaluation_line(label(split, name), where, values, measured.samples, best=decides)
            _log.info("{}", line)
        self.record(split, at, result.values, samples=result.samples)
        if best:
            self.recorder.write("scalars", "best", at.step, drop_duplicate_loss(result.values))

    def end(self, state: State, at: Position, reason: str) -> None:
        """Write the last line, entry and status of the run. Nothing can be written afterwards."""
        why = ""
        if reason not in ("", state):
            why = f": {reason}"
        _log.info("{} at epoch {}, step {}{}", state, current_epoch(at), at.step, why)
        self.recorder.record("end", step=at.step, state=state, reason=reason)
        self._status(state, at.step, reason)
        self.close()

    def fail(self, reason: str) -> None:
        """Write the entry and status of a run that failed, unless it has ended already. From any thread."""
        self.recorder.record("end", state="failed", reason=reason)
        self._status("failed", self.step, reason)

    def close(self) -> None:
        """Flush and close all files. Safe to call twice."""
        self.bar.close()
        self.recorder.close()

    def _status(
        self,
        state: State,
        step: int | None,
        reason: str = "",
    ) -> None:
        with self._recording, warn_on_oserror("status.json"):
            if self._run is None or self._has_ended:
                return
            self._has_ended = state != "running"
            if self._run.lock.is_in_place():  # else another run may have written there
                write_status(self._run.folder, state, step=step, reason=reason)
