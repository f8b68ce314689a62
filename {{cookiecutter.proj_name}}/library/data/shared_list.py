"""A long list that all loader workers share, instead of each holding its own."""

import pickle
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch


class SharedList(Sequence[Any]):
    """A list of picklable records that cannot be changed, held once for a process and all its loader workers.

    Records are stored as bytes in one tensor, and unpickled when they are read (some microseconds for a path and a
    label). An ordinary list is copied by every worker: with `fork` page by page, since reading an object changes its
    reference count; with `spawn` and `forkserver` at once. The tensor is not: forked workers never write to its pages,
    and PyTorch moves a tensor that it sends to a process into shared memory.

    Args:
        records: read once; each must be picklable.
    """

    def __init__(self, records: Iterable[Any]) -> None:
        data, ends = bytearray(), array("q", [0])
        for record in records:
            data += pickle.dumps(record, pickle.HIGHEST_PROTOCOL)
            ends.append(len(data))
        # Without records, `frombuffer` would refuse the empty buffer.
        self._data = torch.frombuffer(data or bytearray(1), dtype=torch.uint8)
        self._ends = torch.frombuffer(ends, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[Any]:
        """Copies of all records, several times faster than one by one."""
        data, ends = self._data.numpy().data, self._ends.tolist()
        return (pickle.loads(data[first:stop]) for first, stop in pairwise(ends))

    def __getitem__(self, index: Any) -> Any:
        """Return a copy of the record: changing it does not change the list. A slice gives a list of copies."""
        number = range(len(self))[index]  # resolves negative numbers, and raises the IndexError of a list
        if isinstance(number, range):
            return [self[index] for index in number]
        first, stop = self._ends[number : number + 2].tolist()
        return pickle.loads(self._data[first:stop].numpy().data)
