"""The losses of training, collected without waiting for the device."""

import math
from collections import deque
from collections.abc import Callable, Mapping
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

    def add(self, losses: Mapping[str, Any], samples: int) -> None:
        """Keep what a `LossFactory` gave for `samples` samples of this process; any number of times in a step."""
        names = losses["names"]
        # detach makes no copy and starts no kernel; without it the graph of every step would stay alive.
        values = [losses["sum"].detach()]
        for name in names:
            values.append(losses[name].detach())
        self._open.append((names, values, samples))

    def stepped(self, step: int) -> None:
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
        parts = [part for _, step_parts in pending for part in step_parts]
        if not parts:
            return
        values = torch.stack([scalar for _, scalars, _ in parts for scalar in scalars])
        weights = [float(samples) for _, scalars, samples in parts for _ in scalars]
        if self._reduce is None:
            numbers = iter(zip(values.tolist(), weights, strict=True))
        else:
            weight = torch.tensor(weights, dtype=torch.float64, device=values.device)
            # A process without samples has a mean of nothing, which is not a number and must not reach the others.
            weighted = torch.where(weight > 0, values.double() * weight, 0.0)
            table = torch.stack((weighted, weight))
            self._reduce(table)
            sums, counts = table.tolist()
            means = [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]
            numbers = iter(zip(means, counts, strict=True))
        for step, step_parts in pending:
            self._take(step, [(name, *next(numbers)) for names, _, _ in step_parts for name in ("loss", *names)])

    def _take(self, step: int, entries: list[tuple[str, float, float]]) -> None:
        by_name: dict[str, list[tuple[float, float]]] = {}
        for name, value, samples in entries:
            by_name.setdefault(name, []).append((value, samples))
        self._last = {name: _mean(values) for name, values in by_name.items()}
        for name, values in by_name.items():
            recent = self._recent.setdefault(name, deque(maxlen=self.window))
            recent.append((self._last[name], sum(samples for _, samples in values)))
        if self._bad is None and not all(map(math.isfinite, self._last.values())):
            self._bad = step


def _mean(values: list[tuple[float, float]]) -> float:
    """Mean weighted by samples; of a single value that value, to the last digit."""
    if len(values) == 1:
        return values[0][0]
    count = sum(samples for _, samples in values)
    return sum(value * samples for value, samples in values) / count if count else math.nan
