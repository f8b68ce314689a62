"""Progress reports of a run: log lines, numbers, pictures. Only the main process writes them."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from loguru import logger
from pydantic import Field
from torch import Tensor
from tqdm import tqdm

from common.base.files import warn_on_oserror
from common.config import section
from common.data.sets import label
from common.distributed import Rank, sum_over_ranks
from common.monitor.clock import Clock, peak_memory
from common.monitor.line import current_epoch, evaluation_line, train_line
from common.monitor.meter import Meter
from common.monitor.pictures import Picture, progress_path, save_png
from common.monitor.show import Show
from common.monitor.writer import NullWriter, Writer
from common.optim.groups import learning_rates
from common.progress import Position
from common.run.folder import OpenRun
from common.run.status import State, write_status

if TYPE_CHECKING:
    from common.evaluation.evaluator import SplitResult

# Log records show the line that called the monitor, not a line of this file.
_log = logger.opt(depth=1)
_NO_METRICS: dict[str, float] = {}

Level = Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"]


@section
class MonitorConfig:
    """Logging and metrics."""

    log_level: Annotated[Level, Field(description="lowest level of log records that are kept")] = "INFO"
    levels: Annotated[
        dict[str, Level], Field(description="other levels for some modules, as in {common.trainer: DEBUG}")
    ] = field(default_factory=dict)
    smooth: Annotated[int, Field(ge=1, description="steps over which the log line's losses are averaged")] = 20
    tensorboard: Annotated[bool, Field(description="write TensorBoard files; metrics.jsonl is always written")] = True
    bar: Annotated[Literal["auto", "on", "off"], Field(description="progress bar; auto: on a terminal")] = "auto"


class Monitor:
    """Writes lines to the log, numbers and pictures to files; holds the meter and the clock.

    Args:
        run: the open run folder, in the main process; None in the others, which then write nothing.
        resume_step: optimizer steps of the checkpoint that this run continues from; later entries are removed.
        local_pictures: write pictures as PNG files too.
        workers: number of loader workers, for advice on it.

    Attributes:
        after_step: functions to call after each optimizer step; add your own.
        start: optimizer steps done when training began; None before.
        step: optimizer steps done now.
    """

    def __init__(
        self,
        config: MonitorConfig,
        rank: Rank,
        run: OpenRun | None,
        *,
        resume_step: int | None = None,
        local_pictures: bool = False,
        workers: int = 0,
    ) -> None:
        self.meter = Meter(config.smooth, None if rank.is_alone else lambda table: sum_over_ranks(table, rank))
        self.clock = Clock()
        self.batch_ready = self.clock.batch_ready
        self.reset_timer = self.clock.reset
        self.after_step: list[Callable[[], object]] = []
        self.start: int | None = None
        self.step: int | None = None
        self._device = rank.device
        # Slurm gives each process cores of its own.
        self._sharing = workers, 1 if rank.launcher == "slurm" else rank.local_world
        self._totals: tuple[int | None, int | None] = (None, None)  # steps and epochs of the run, where known
        self._recording = threading.Lock()  # another thread records the failure of another process
        self._has_ended = False
        self._folder = None if run is None else run.folder
        self._pictures = run.folder.progress if run is not None and local_pictures else None
        # tqdm's `disable`: None shows the bar on a terminal only.
        self._hides_bar = {"auto": None, "on": False, "off": True}[config.bar] if run is not None else True
        self.bar: tqdm[Any] = tqdm(disable=True)
        self.writer: Writer | NullWriter = NullWriter()
        if run is not None:
            event = run.folder.event if config.tensorboard else None
            self.writer = Writer(
                run.folder.metrics_file, event, run_id=run.id, attempt=run.attempt, resume_step=resume_step
            )

    @contextmanager
    def training(self, at: Position, total_steps: int | None, epochs: int | None = None) -> Iterator[None]:
        """Wraps the training loop: starts the clock, shows the progress bar. Unknown totals are None."""
        self._totals = total_steps, epochs
        self.start = self.step = at.step
        self._status("running", at.step)
        self.bar = tqdm(
            total=total_steps, initial=at.step, unit="step", dynamic_ncols=True, leave=False, disable=self._hides_bar
        )
        self.clock.start()
        try:
            yield
        finally:
            self.bar.close()
            self.writer.flush()

    def step_done(self, at: Position, samples: int) -> None:
        """An optimizer step on `samples` samples, of all processes, is done."""
        self.clock.step_done(samples)
        self.step = at.step
        self.bar.update()
        for call in tuple(self.after_step):
            call()

    def show(self, at: Position) -> Show:
        """Where the task writes what it wants to show at this log line."""
        return Show(self.writer, at.step)

    def train(
        self,
        at: Position,
        optimizer: torch.optim.Optimizer,
        grad_norm: Tensor | None,
        metrics: Mapping[str, float] = _NO_METRICS,
    ) -> None:
        """Write the log line of training and its scalars. Waits for the device; every process must call it."""
        losses = self.meter.read()
        norm = {} if grad_norm is None else {"grad_norm": float(grad_norm)}
        found = learning_rates(optimizer)
        rates = {"lr" if len(found) == 1 else f"lr_{name}": rate for name, rate in found.items()}
        timing = self.clock.read(None if self._totals[0] is None else self._totals[0] - at.step)
        memory = peak_memory(self._device)
        _log.info("{}", train_line(at, self._totals, rates, losses, {**metrics, **norm}, timing, memory))
        if advice := self.clock.advice(timing, *self._sharing):
            _log.warning("{}", advice)
        self.writer.scalars("train", at.step, losses.raw | dict(metrics) | norm | rates, epoch=current_epoch(at))
        # Separate from the others, since these differ from run to run.
        speed = {"step_seconds": timing.step, "data_share": timing.data, "samples_per_second": timing.rate}
        self.writer.scalars("speed", at.step, speed | {"memory_bytes": memory}, epoch=current_epoch(at))
        self.reset_timer()

    def evaluation(self, split: str, at: Position, result: "SplitResult", *, best: bool = False) -> None:
        """Write a line for each set of the `split` data, the scalars of all sets, and pictures."""
        for name, one in result.sets.items():
            _log.info("{}", evaluation_line(label(split, name), at, one.values, one.samples, best=best))
            self.pictures(f"{split}/{name}" if name else split, at, one.pictures)
        self.writer.scalars(split, at.step, result.values, epoch=current_epoch(at), samples=result.samples)

    def pictures(self, split: str, at: Position, pictures: Sequence[Picture]) -> None:
        """Write pictures of the `split` (or split/set) data. An index replaces missing, extends repeated names."""
        names = [picture.name or f"{index:02}" for index, picture in enumerate(pictures)]
        for index, (name, picture) in enumerate(zip(names, pictures, strict=True)):
            own = f"{name}_{index:02}" if name in names[:index] else name
            self.writer.image(at.step, f"{split}/{own}", picture.image)
            if self._pictures is not None:
                with warn_on_oserror("a picture"):
                    save_png(progress_path(self._pictures, split, own, current_epoch(at), at.step), picture.image)

    def saving(self, at: Position, *, best: bool, numbered: bool) -> None:
        """Called before a checkpoint is written: flush everything that was measured up to it to disk."""
        self.writer.record("checkpoint", step=at.step, epoch=current_epoch(at), best=best, numbered=numbered)
        self.writer.flush()

    def end(self, state: State, at: Position, reason: str) -> None:
        """Write the last line, entry and status of the run. Nothing can be written afterwards."""
        why = f": {reason}" if reason not in ("", state) else ""
        _log.info("{} at epoch {}, step {}{}", state, current_epoch(at), at.step, why)
        self.writer.record("end", step=at.step, state=state, reason=reason)
        self._status(state, at.step, reason)
        self.close()

    def fail(self, reason: str) -> None:
        """Write the entry and status of a run that failed, unless it has ended already. From any thread."""
        self.writer.record("end", state="failed", reason=reason)
        self._status("failed", self.step, reason)

    def close(self) -> None:
        """Flush and close all files. Safe to call twice."""
        self.bar.close()
        self.writer.close()

    def _status(self, state: State, step: int | None, reason: str = "") -> None:
        with self._recording, warn_on_oserror("status.json"):
            if self._folder is not None and not self._has_ended:
                self._has_ended = state != "running"
                write_status(self._folder, state, step=step, reason=reason)
