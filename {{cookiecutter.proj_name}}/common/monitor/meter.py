"""The losses of training, collected without waiting for the device; times and memory."""

import math
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from common.distributed import has_streams
from common.progress import Position

# Steps after which losses are read even without a log line, so that they do not pile up in the device's memory.
_MOST_PENDING = 1000


@dataclass(frozen=True)
class Reading:
    """Losses by name, `loss` (the weighted sum) first.

    Attributes:
        raw: of the last step, over the samples of all processes.
        smooth: mean over the samples of the last `window` steps.
    """

    raw: dict[str, float]
    smooth: dict[str, float]


# Of a step's loss, by step and name: the sum over samples, and their number.
_Sums = dict[tuple[int, str], list[float]]

# Of one process: where its first bad step began and which loss it was, and the sums of the last steps.
_Found = tuple[tuple[Position, str] | None, _Sums]


class Meter:
    """Collects the losses of every step: `add` only keeps references, all arithmetic is done when they are read.

    Args:
        window: optimizer steps averaged in the smooth values.
        gather: returns the value of every process. So `first_bad_step` and `read` are collectives: every process must
            call them at the same steps.

    Attributes:
        clock: times the steps, and counts the items of a task.
    """

    def __init__(
        self,
        window: int,
        gather: Callable[[_Found], list[_Found]],
    ) -> None:
        self.clock = Clock()
        self._window = window
        self._gather = gather
        self._pending: list[tuple[Position, dict[str, Tensor], int]] = []
        self._recent: _Sums = {}
        self._last = 0  # step
        self._bad_step: int | None = None
        self.bad_here: tuple[Position, str] | None = None  # of this process: where its first bad step began, which loss

    def add(
        self,
        at: Position,
        losses: Mapping[str, Tensor],
        count: int,
    ) -> None:
        """Keep the losses of a micro-batch of the step that begins `at`: means over `count` samples or items."""
        if self._pending and at.step - self._pending[0][0].step >= _MOST_PENDING:
            self._collect()
        # detach makes no copy and starts no kernel; without it the graph of every step would stay alive.
        held = {name: value.detach() for name, value in losses.items()}
        self._pending.append((at, held, count))

    def discard(self, at: Position, keep: int = 0) -> None:
        """Forget the losses of the latest step, which began `at`, but for those of its first `keep` micro-batches."""
        others = [entry for entry in self._pending if entry[0] != at]
        self._pending = self._pending[: len(others) + keep]

    def first_bad_step(self) -> int | None:
        """Return the first step with a loss that is not a finite number, on any process; None when there was none."""
        self._collect()
        return self._bad_step

    def read(self) -> Reading:
        """Read the losses up to the last step. Waits for the device."""
        self._collect()
        raw = {}
        smooth = {}
        window: _Sums = {}
        for (step, name), (total, count) in self._recent.items():
            _add(window, (self._last, name), total, count)
            if step == self._last:
                raw[name] = total / max(count, 1)
        for (_, name), (total, count) in window.items():
            smooth[name] = total / max(count, 1)
        return Reading(raw, smooth)

    def _collect(self) -> None:
        """Copy the pending losses to the host: one transfer, and one exchange if there are other processes."""
        pending = self._pending
        self._pending = []
        if not pending:
            return
        self._last = pending[-1][0].step + 1
        before = self._last - self._window  # the last step that is not shown any more
        sums: _Sums = {}
        read = to_floats([losses for _, losses, _ in pending])
        for (at, _, count), values in zip(pending, read, strict=True):
            step = at.step + 1
            for name, value in values.items():
                if count == 0:
                    value = 0.0  # a mean over nothing must not count, and may be NaN
                if not math.isfinite(value):
                    self.bad_here = self.bad_here or (at, name)
                if step > before:
                    _add(sums, (step, name), value * count, count)
        self._recent = {place: both for place, both in self._recent.items() if place[0] > before}
        for bad, part in self._gather((self.bad_here, sums)):  # processes need not have losses of the same names
            if bad:
                step = bad[0].step + 1
                self._bad_step = min(step, self._bad_step or step)
            for place, (total, items) in part.items():
                _add(self._recent, place, total, items)


@dataclass(frozen=True)
class Timing:
    """Attributes:
    step: seconds for each optimizer step since the last reading, waiting for data included.
    data: share of that spent waiting for data, 0 to 1.
    rate: samples per second.
    eta: seconds to the end of training; None when the end is not known.
    items: those that the task counts (`Task.count`), per second; 0 if it counts none.
    """

    step: float
    data: float
    rate: float
    eta: float | None
    items: float


class Clock:
    """Times the loop: `batch_ready` when a batch has arrived, `step_done` after each optimizer step.

    Times are measured on the host. A GPU runs asynchronously, so a single step says little; over a log period they are
    right, since logging waits for the device. The first step starts workers and compiles kernels, so it is part of no
    average.

    Attributes:
        items: items that the task has counted since the last reading, over all processes.
        started: when training began.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start the clock, when training begins."""
        self.started = self._counted_from = perf_counter()
        self._done = 0  # steps
        self.reset()
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._busy = self._waited = self.items = 0.0
        self._steps = self._samples = 0

    def reset(self) -> None:
        """Exclude the time since the last step (validation, a save): it counts for the remaining time only."""
        self._mark = perf_counter()

    def batch_ready(self) -> None:
        """Note that a batch has arrived."""
        if self._done == 1:
            self._counted_from = self._mark
            self._begin_interval()
        self._waited += perf_counter() - self._mark

    def _pass(self) -> None:
        now = perf_counter()
        self._busy += now - self._mark
        self._mark = now

    def step_done(self, samples: int) -> None:
        """Note that an optimizer step on `samples` samples (of all processes) is done."""
        self._pass()
        self._done += 1
        self._steps += 1
        self._samples += samples

    def read(self, steps_left: int | None) -> Timing:
        """Times since the last reading; a new interval starts here. Right after step 1: the times of step 1."""
        self._pass()
        busy = max(self._busy, 1e-9)
        eta = None
        if steps_left is not None:
            counted = max(self._done - 1, 1)
            eta = steps_left * (self._mark - self._counted_from) / counted
        timing = Timing(
            busy / max(self._steps, 1),
            self._waited / busy,
            self._samples / busy,
            eta,
            self.items / busy,
        )
        self._begin_interval()
        return timing


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of tensors on a GPU since the last call, elsewhere of this process so far."""
    if has_streams(device):
        peak = torch.accelerator.max_memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak
    return peak * 1024


def to_floats(
    losses: Sequence[Mapping[str, Tensor]],
) -> list[dict[str, float]]:
    """Return the values of scalars that are on a device, brought to the host in one transfer."""
    scalars: list[Tensor] = []
    for step in losses:
        scalars += step.values()
    together = [value.to(scalars[0].device) for value in scalars]  # one may be a constant on the CPU
    values = iter(torch.stack(together).tolist() if together else [])
    return [{name: next(values) for name in step} for step in losses]


def _add(sums: _Sums, place: tuple[int, str], total: float, count: float) -> None:
    both = sums.setdefault(place, [0.0, 0])
    both[0] += total
    both[1] += count
