"""Time per step, time spent waiting for data, and peak memory use."""

import resource
import sys
from dataclasses import dataclass
from time import perf_counter

import torch

from common.distributed import has_streams


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
    items: float = 0.0


class Clock:
    """Times the loop: `batch_ready` when a batch has arrived, `step_done` after each optimizer step.

    Times are measured on the host. A GPU runs asynchronously, so a single step says little; over a log period they are
    right, since logging waits for the device. The first step starts workers and compiles kernels, so it is timed
    separately, and is no part of any average.

    Attributes:
        items: items that the task has counted since the last reading, over all processes.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start the clock, when training begins."""
        self._first: Timing | None = None
        self._done = 0  # steps since the first one
        self.started = self._first_ended = perf_counter()
        self._begin_interval(self.started)

    def _begin_interval(self, now: float) -> None:
        self._begin = self._mark = now
        self._paused = self.items = 0.0
        self._waited = 0.0  # seconds
        self._steps = self._samples = 0

    def reset(self) -> None:
        """Exclude the time since the last step (validation, a save): it counts for the remaining time only."""
        now = perf_counter()
        self._paused += now - self._mark
        self._mark = now

    def batch_ready(self) -> None:
        """Note that a batch has arrived."""
        self._waited += perf_counter() - self._mark

    def step_done(self, samples: int) -> None:
        """Note that an optimizer step on `samples` samples (of all processes) is done."""
        self._mark = perf_counter()
        self._steps += 1
        self._samples += samples
        if self._first is None:
            self._first = self.read()
            self._done = 0
            self._first_ended = self._begin

    def read(self, steps_left: int | None = None) -> Timing:
        """Times since the last reading; a new interval starts here. (Right after step 1: the times of step 1.)"""
        if self._first is not None and not self._steps:
            return self._first
        now = perf_counter()
        steps = max(self._steps, 1)
        busy = max(now - self._begin - self._paused, 1e-9)
        self._done += steps
        eta = None
        if steps_left is not None:
            eta = steps_left * (now - self._first_ended) / self._done
        timing = Timing(
            busy / steps,
            self._waited / busy,
            self._samples / busy,
            eta,
            self.items / busy,
        )
        self._begin_interval(now)
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
