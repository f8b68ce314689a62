"""Where the time goes: two looks at the clock in every step. And how much memory it takes."""

import math
import sys
from collections import deque
from dataclasses import dataclass
from time import perf_counter

import torch

from common.base.process import available_cores

# Data are worth a warning when waiting for them takes this share of the time,
_SLOW_SHARE = 0.3
_SLOW_BATCH_S = 0.002  # this long for each step (less is the cost of calling the loader at all),
_SLOW_TOTAL_S = 2.0  # and this long altogether.


@dataclass(frozen=True)
class Timing:
    """Attributes:
    step: seconds for each optimizer step since the last reading, waiting for data included.
    data: share of that spent waiting for data, 0 to 1.
    rate: samples per second.
    eta: seconds to the end of training; None when the end is not known.
    """

    step: float
    data: float
    rate: float
    eta: float | None


class Clock:
    """Times the loop: `batch_ready` when a batch has arrived, `step_done` after each optimizer step.

    The times are the host's. A GPU runs behind, so a single step says little; over a log period they are right, since
    logging waits for the device.

    Args:
        window: readings that the estimate of the remaining time looks back on.
    """

    def __init__(self, window: int = 10) -> None:
        self._intervals: deque[tuple[int, float]] = deque(maxlen=window)
        self._advised = False
        self._waited = 0.0
        self.start()

    def start(self) -> None:
        """Training begins now."""
        self._first: tuple[float, float] | None = None  # time and waiting of the first step
        self._intervals.clear()
        self._mark = self._read_at = perf_counter()
        self._busy = self._data = 0.0
        self._steps = self._samples = 0

    def reset(self) -> None:
        """Training continues after something else (validation, a save), which counts for the remaining time only."""
        self._mark = perf_counter()

    def batch_ready(self) -> None:
        """A batch has arrived."""
        now = perf_counter()
        self._data += now - self._mark
        self._busy += now - self._mark
        self._mark = now

    def step_done(self, samples: int) -> None:
        """An optimizer step on `samples` samples (of all processes) is done."""
        now = perf_counter()
        self._busy += now - self._mark
        self._mark = now
        self._steps += 1
        self._samples += samples
        if self._first is None:
            self._first = self._busy, self._data

    def read(self, steps_left: int | None = None) -> Timing:
        """Times since the last reading; the next one starts here.

        The first step is left out as soon as there are others: it starts workers and compiles kernels.
        """
        now = perf_counter()
        steps, busy, data, samples = self._steps, self._busy, self._data, float(self._samples)
        wall = now - self._read_at
        if self._first is not None and not self._intervals and steps > 1:
            busy, data, wall = busy - self._first[0], data - self._first[1], wall - self._first[0]
            samples *= (steps - 1) / steps
            steps -= 1
        if steps:
            self._intervals.append((steps, wall))
        self._waited += data
        self._read_at = now
        self._busy = self._data = 0.0
        self._steps = self._samples = 0
        return Timing(
            step=busy / steps if steps else math.nan,
            data=data / busy if busy > 0 else 0.0,
            rate=samples / busy if busy > 0 else 0.0,
            eta=self._eta(steps_left),
        )

    def advice(self, timing: Timing, workers: int) -> str | None:
        """What to do when training waits for data a good part of the time; once per run."""
        is_slow = timing.data > _SLOW_SHARE and timing.data * timing.step >= _SLOW_BATCH_S
        if self._advised or not is_slow or self._waited < _SLOW_TOTAL_S:
            return None
        self._advised = True
        cores = available_cores()
        # So many times the loading work must be done at once for none of it to be waited for.
        wanted = math.ceil(max(workers, 1) / max(1 - timing.data, 0.05))
        more = f"--worker {min(wanted, cores)} (now {workers}; this process may use {cores} cores)"
        if workers >= cores:
            more = f"a cheaper data set or one kept in memory, since all {cores} cores this process may use are at work"
        return f"{timing.data:.0%} of the time is spent waiting for data; try {more}"

    def _eta(self, steps_left: int | None) -> float | None:
        steps = sum(steps for steps, _ in self._intervals)
        if steps_left is None or not steps:
            return None
        return steps_left * sum(seconds for _, seconds in self._intervals) / steps


def peak_memory(device: torch.device) -> int:
    """Most bytes in use at once: of tensors on a CUDA device since the last call, elsewhere of this process ever."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
