"""The list that all loader workers share."""

import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from library.data.shared_list import SharedList

RECORDS: list[Any] = [("a/b.png", 3), {"boxes": [[1.0, 2.0]]}, None, b"\0" * 5, Path("x"), ""]


def test_it_reads_like_a_list() -> None:
    shared = SharedList(iter(RECORDS))
    assert len(shared) == len(RECORDS) and list(shared) == RECORDS
    assert shared[-1] == "" and shared[1:5:2] == RECORDS[1:5:2]
    assert ("a/b.png", 3) in shared and shared.index(None) == 2
    with pytest.raises(IndexError):
        shared[len(RECORDS)]
    shared[1]["boxes"].clear()
    assert shared[1] == RECORDS[1]
    assert not SharedList([]) and list(SharedList([])) == []
    assert list(pickle.loads(pickle.dumps(shared))) == RECORDS


class Records:
    """The records, and where the process that reads them holds them."""

    def __init__(self) -> None:
        self.records = SharedList(range(1000, 1400))

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[int, int, bool]:
        return self.records[index], os.getpid(), self.records._data.is_shared()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_read_the_same_memory(method: str) -> None:
    """Sent to a process, the bytes move to shared memory; forked, they stay on the pages without writes."""
    data = Records()
    context = multiprocessing.get_context(method)
    found = list(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context))
    assert [number for number, _, _ in found] == list(range(1000, 1400))
    pids = {pid for _, pid, _ in found}
    assert len(pids) == 2 and os.getpid() not in pids
    if method == "fork":
        assert not data.records._data.is_shared()
    else:
        assert all(is_shared for _, _, is_shared in found) and data.records._data.is_shared()
    torch.testing.assert_close(data.records._ends[-1], torch.tensor(data.records._data.numel()))
