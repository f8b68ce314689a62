"""The losses of training, collected without waiting for the device."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


_Sum = tuple[float, int]  # sum of the losses of samples, and number of samples


class Meter:
    """Collects the losses of every step: `add` only keeps references, all arithmetic is done when they are read.

    Args:
        window: optimizer steps averaged in the smooth values.
        reduce: sums a float64 tensor over all processes, in place. With it, `first_bad_step` and `read` are
            collectives: every process must call them at the same steps. None in a single process.
    """

    def __init__(self, window: int = 20, reduce: Callable[[Tensor], Any] | None = None) -> None:
        self._reduce = reduce
        self._pending: list[tuple[int, dict[str, Tensor], int]] = []
        self._recent: deque[dict[str, _Sum]] = deque(maxlen=window)  # steps
        self._bad: tuple[int, str] | None = None
        self.bad_here: tuple[int, str] | None = None  # of this process' own losses: the first bad step, and which loss

    def add(self, step: int, losses: Mapping[str, Tensor], samples: int) -> None:
        """Keep the losses from a `LossFactory` for `samples` samples of this process in step `step`, from 1 up.

        A step may have any number of micro-batches.
        """
        if self._pending and step - self._pending[0][0] >= _MOST_PENDING:
            self._collect()
        # detach makes no copy and starts no kernel; without it the graph of every step would stay alive.
        held = {name: value.detach() for name, value in losses.items()}
        self._pending.append((step, held, samples))

    def discard(self, step: int) -> None:
        """Forget the losses of the latest step, which was skipped."""
        self._pending = [entry for entry in self._pending if entry[0] != step]

    def first_bad_step(self) -> int | None:
        """Return the first step with a loss that is not a finite number, on any process; None when there was none."""
        self._collect()
        return self._bad and self._bad[0]

    def read(self) -> Reading:
        """Read the losses up to the last step. Waits for the device."""
        self._collect()
        raw: dict[str, float] = {}
        smooth: dict[str, float] = {}
        if self._recent:
            for name, last in self._recent[-1].items():
                raw[name] = _mean([last])
                smooth[name] = _mean(step[name] for step in self._recent if name in step)
        return Reading(raw, smooth)

    def _collect(self) -> None:
        """Copy the pending losses to the host: one transfer, and one reduction if there are other processes."""
        pending = self._pending
        self._pending = []
        if not pending:
            return
        steps: dict[int, dict[str, _Sum]] = {}
        read = to_floats([losses for _, losses, _ in pending])
        for (step, _, samples), values in zip(pending, read, strict=True):
            sums = steps.setdefault(step, {})
            for name, value in values.items():
                total, count = sums.get(name, (0.0, 0))
                if samples:  # the loss of a process without samples must not count, and may be NaN
                    total += value * samples
                sums[name] = (total, count + samples)
        self.bad_here = self.bad_here or _first_bad(steps)
        if self._reduce is not None:
            rows: list[_Sum] = []
            for sums in steps.values():
                rows += sums.values()
            table = torch.tensor(rows, dtype=torch.float64)
            self._reduce(table)
            reduced = iter(table.tolist())
            for sums in steps.values():
                for name in sums:
                    sums[name] = next(reduced)
        self._bad = self._bad or _first_bad(steps)
        self._recent.extend(steps.values())


def to_floats(losses: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """Return the values of scalars that are on a device, brought to the host in one transfer."""
    scalars: list[Tensor] = []
    for step in losses:
        scalars += step.values()
    values = iter(torch.stack(scalars).tolist() if scalars else [])
    return [{name: next(values) for name in step} for step in losses]


def _mean(sums: Iterable[_Sum]) -> float:
    totals, counts = zip(*sums, strict=True)
    return sum(totals) / max(sum(counts), 1)


def _first_bad(steps: Mapping[int, Mapping[str, _Sum]]) -> tuple[int, str] | None:
    for step, losses in steps.items():
        for name, (total, _) in losses.items():
            if not math.isfinite(total):
                return step, name
    return None
