"""Results of single samples: kept on the CPU during a pass, then put into the order of the data set."""

from typing import Any

import torch
from torch import Tensor

from common.base.errors import UserError
from common.data.move import map_tensors
from common.distributed import Rank, gather_objects, gather_tensors, gather_to_main

Results = dict[str, Any]
"""By name, one entry per sample: a tensor, whose first dimension is the samples, or a list."""


class SampleBuffer:
    """Results of one metric for the samples of this process, until they are gathered."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._places: list[int] = []
        self._parts: dict[str, list[Any]] = {}
        self.bytes = 0  # of tensors

    def add(self, results: Results, first: int) -> None:
        """Take in what the metric gave for a batch that begins with the sample `first` of the data set."""
        counts = {name: _entries(value) for name, value in results.items()}
        if len(set(counts.values())) != 1 or None in counts.values():
            shown = ", ".join(f"{name} has {count or 'none'}" for name, count in counts.items()) or "there is none"
            raise UserError(f"metric.{self._metric}: every result must have one entry per sample, but {shown}")
        if self._parts and self._parts.keys() != results.keys():
            names = ", ".join(self._parts), ", ".join(results)
            raise UserError(f"metric.{self._metric}: the results of one batch are {names[0]}, of another {names[1]}")
        for name, value in results.items():
            self._parts.setdefault(name, []).append(map_tensors(value, self._own_copy))
        self._places += [first] * len(next(iter(results.values())))

    def _own_copy(self, tensor: Tensor) -> Tensor:
        # A copy on the CPU too: a worker's tensor holds a file of shared memory open, a view the whole it looks at.
        copied = tensor.detach().to("cpu", copy=True)
        self.bytes += copied.nbytes
        return copied

    def gather(self, rank: Rank) -> Results:
        """What all processes kept, in the order of the data set, on the main process; nothing on the others."""
        own = {name: _joined(parts, self._label(name)) for name, parts in self._parts.items()}
        self._parts = {}
        kinds = gather_objects({name: isinstance(value, Tensor) for name, value in own.items()}, rank)
        places = gather_tensors(torch.tensor(self._places, dtype=torch.int64), rank)
        shares: dict[str, list[Any]] = {}
        for name, is_tensor in max(kinds, key=len).items():  # a process without samples knows no names
            if is_tensor:
                shares[name] = gather_tensors(own.pop(name, torch.empty(0)), rank)
            else:
                shares[name] = gather_to_main(own.pop(name, []), rank)
        if not rank.is_main:
            return {}
        order = torch.argsort(torch.cat(places), stable=True)
        return {name: _taken(_joined(parts, self._label(name)), order) for name, parts in shares.items()}

    def _label(self, name: str) -> str:
        return f"metric.{self._metric}: {name}"


def _entries(value: Any) -> int | None:
    """How many samples a result is about; None when it is nothing that has entries."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else None
    return len(value) if isinstance(value, list) else None


def _joined(parts: list[Any], label: str) -> Any:
    """Parts of a result one after the other; those without an entry, which have no shape either, left out."""
    parts = [part for part in parts if len(part)] or parts[:1]
    if isinstance(parts[0], list):
        return [entry for part in parts for entry in part]
    shapes = {tuple(part.shape[1:]): None for part in parts}
    if len(shapes) > 1:
        first, other = map(list, list(shapes)[:2])
        raise UserError(f"{label} has the shape {first} for some samples and {other} for others; give a list instead")
    return torch.cat(parts)


def _taken(values: Any, order: Tensor) -> Any:
    return values[order] if isinstance(values, Tensor) else [values[at] for at in order.tolist()]
