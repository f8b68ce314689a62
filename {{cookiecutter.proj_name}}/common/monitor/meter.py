"""The losses of training, collected without waiting for the device."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
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


_Part = tuple[list[str], list[Tensor], int]  # of one micro-batch: names, scalars on the device, samples
_Loss = tuple[float, int]  # mean, and the samples it is over


class Meter:
    """Collects the losses of every step; `add` and `step_done` only keep references, reading is one transfer.

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
        self._recent: defaultdict[str, deque[_Loss]] = defaultdict(lambda: deque(maxlen=window))
        self._last: dict[str, float] = {}
        self._bad: int | None = None
        self.bad_here: int | None = None  # the same, of this process' own losses

    def add(self, losses: Mapping[str, Any], samples: int) -> None:
        """Keep what a `LossFactory` gave for `samples` samples of this process; any number of times in a step."""
        names = losses["names"]
        # detach makes no copy and starts no kernel; without it the graph of every step would stay alive.
        self._open.append((names, [losses["sum"].detach(), *(losses[name].detach() for name in names)], samples))

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
        return Reading(dict(self._last), {name: _mean(self._recent[name])[0] for name in self._last})

    def _collect(self) -> None:
        """Bring the pending losses to the host: one transfer, and one exchange when there are other processes."""
        pending, self._pending = self._pending, []
        scalars = [scalar for _, parts in pending for _, values, _ in parts for scalar in values]
        if not scalars:
            return
        numbers = iter(torch.stack(scalars).tolist())
        measured: defaultdict[tuple[int, str], list[_Loss]] = defaultdict(list)
        for step, parts in pending:
            for names, _, samples in parts:
                for name in ("loss", *names):
                    measured[step, name].append((next(numbers), samples))
        losses = {key: _mean(values) for key, values in measured.items()}
        self.bad_here = self.bad_here or _first_bad(losses)
        if self._reduce is not None:
            losses = dict(zip(losses, _over_processes(losses.values(), self._reduce), strict=True))
        self._bad = self._bad or _first_bad(losses)
        for (_, name), loss in losses.items():
            self._recent[name].append(loss)
        self._last = {name: value for (step, name), (value, _) in losses.items() if step == pending[-1][0]}


def _over_processes(losses: Iterable[_Loss], reduce: Callable[[Tensor], Any]) -> list[_Loss]:
    """The same losses over the samples of all processes."""
    # A process without samples has a mean of nothing, which need not be a number and must not reach the others.
    rows = [(value * samples if samples else 0.0, samples) for value, samples in losses]
    table = torch.tensor(rows, dtype=torch.float64)
    reduce(table)
    return [(total / count if count else 0.0, int(count)) for total, count in table.tolist()]


def _first_bad(losses: Mapping[tuple[int, str], _Loss]) -> int | None:
    bad = (step for (step, _), (value, samples) in losses.items() if samples and not math.isfinite(value))
    return next(bad, None)


def _mean(values: Collection[_Loss]) -> _Loss:
    """Mean weighted by samples, and the samples; of a single value that value, to the last digit."""
    if len(values) == 1:
        return next(iter(values))
    count = sum(samples for _, samples in values)
    return sum(value * samples for value, samples in values) / count if count else math.nan, count
