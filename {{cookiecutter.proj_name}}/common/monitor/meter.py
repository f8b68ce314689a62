"""The losses of training, collected without waiting for the device."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Steps after which collected losses are read even if nobody asks, so that they do not pile up in the device's memory.
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


# What one micro-batch gave: names of the parts, scalars on the device (the sum first), samples. A tuple, since making
# one takes a tenth of the time that any class takes, in every step.
_Part = tuple[list[str], list[Tensor], int]
_Loss = tuple[float, float]  # mean, and the samples it is over


class Meter:
    """Collects the losses of every step; `add` and `stepped` only keep references, reading is one transfer.

    Args:
        window: optimizer steps that the smooth values reach over.
        reduce: sums a float64 tensor over all processes, in place. With it, `first_bad_step` and `read` are
            collectives: every process must call them at the same steps. None in a single process.
    """

    def __init__(self, window: int = 20, reduce: Callable[[Tensor], Any] | None = None) -> None:
        self.window = window
        self._reduce = reduce
        self._open: list[_Part] = []
        self._pending: list[tuple[int, list[_Part]]] = []
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._last: dict[str, float] = {}
        self._bad: int | None = None
        self.bad_here: int | None = None  # the same, of this process' own losses

    def add(self, losses: Mapping[str, Any], samples: int) -> None:
        """Keep what a `LossFactory` gave for `samples` samples of this process; any number of times in a step."""
        names, total = losses["names"], losses["sum"]
        # detach makes no copy and starts no kernel; without it the graph of every step would stay alive.
        value = total.detach()
        if len(names) == 1 and losses[names[0]] is total:
            self._open.append((names, [value, value], samples))
        else:
            self._open.append((names, [value, *(losses[name].detach() for name in names)], samples))

    def step_done(self, step: int) -> None:
        """What was added since the last call belongs to optimizer step `step`, counted from 1."""
        self._pending.append((step, self._open))
        self._open = []
        if len(self._pending) >= _MOST_PENDING:
            self._collect()

    def first_bad_step(self) -> int | None:
        """The first step with a loss that is not a finite number, on any process; None when there was none."""
        self._collect()
        return self._bad

    def read(self) -> Reading:
        """The losses up to the last step. Waits for the device."""
        self._collect()
        smooth = {name: _mean(list(values)) for name, values in self._recent.items() if name in self._last}
        return Reading(dict(self._last), smooth)

    def _collect(self) -> None:
        """Bring the pending losses to the host: one transfer, and one exchange when there are other processes."""
        pending, self._pending = self._pending, []
        scalars = [scalar for _, parts in pending for _, values, _ in parts for scalar in values]
        if not scalars:
            return
        numbers = iter(torch.stack(scalars).tolist())
        steps = [_one_step(parts, numbers) for _, parts in pending]
        if self.bad_here is None:
            bad = (step for (step, _), losses in zip(pending, steps, strict=True) if not _are_finite(losses))
            self.bad_here = next(bad, None)
        if self._reduce is not None:
            steps = _over_processes(steps, self._reduce)
        for (step, _), losses in zip(pending, steps, strict=True):
            self._last = {name: value for name, (value, _) in losses.items()}
            for name, loss in losses.items():
                recent = self._recent.get(name)
                if recent is None:
                    recent = self._recent[name] = deque(maxlen=self.window)
                recent.append(loss)
                if self._bad is None and not math.isfinite(loss[0]):
                    self._bad = step


def _one_step(parts: list[_Part], numbers: Iterator[float]) -> dict[str, _Loss]:
    """The losses of one optimizer step of this process, over its micro-batches."""
    if len(parts) == 1:  # the common case: as it was measured, to the last digit
        names, _, samples = parts[0]
        return {name: (next(numbers), samples) for name in ("loss", *names)}
    by_name: dict[str, list[_Loss]] = {}
    for names, _, samples in parts:
        for name in ("loss", *names):
            by_name.setdefault(name, []).append((next(numbers), samples))
    return {name: (_mean(values), sum(samples for _, samples in values)) for name, values in by_name.items()}


def _over_processes(steps: list[dict[str, _Loss]], reduce: Callable[[Tensor], Any]) -> list[dict[str, _Loss]]:
    """The same, over all processes; they may have had different numbers of micro-batches, but the same losses."""
    rows = [loss for losses in steps for loss in losses.values()]
    # A process without samples has a mean of nothing, which need not be a number and must not reach the others.
    table = torch.tensor(
        [(value * samples if samples else 0.0, samples) for value, samples in rows], dtype=torch.float64
    )
    reduce(table)
    summed = iter(table.tolist())
    means = [
        {name: (total / count if count else 0.0, count) for name, (total, count) in zip(losses, summed, strict=False)}
        for losses in steps
    ]
    return means


def _are_finite(losses: dict[str, _Loss]) -> bool:
    return all(math.isfinite(value) for value, samples in losses.values() if samples)


def _mean(values: list[tuple[float, float]]) -> float:
    """Mean weighted by samples; of a single value that value, to the last digit."""
    if len(values) == 1:
        return values[0][0]
    count = sum(samples for _, samples in values)
    return sum(value * samples for value, samples in values) / count if count else math.nan
