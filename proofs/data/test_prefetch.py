"""`loader.prefetch_to_device`: the order of copies and computation, with CUDA's streams replaced by a list of calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from common.data import loader, prefetch
from common.data.loader import LoaderConfig, TrainStream
from common.data.order import EpochOrder
from common.data.plan import EpochPlan
from common.progress import Position
from tests.conftest import Runs, metrics


class Squares:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"square": torch.tensor(index**2)}


class Recorder:
    """Stands in for CUDA: `calls` has what was asked of it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.copies = 0
        for name, fake in {"Stream": self.stream, "stream": self.use, "current_stream": self.stream}.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(prefetch, "to_device", self.copy)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, _: self.calls.append(("keep", tensor.tolist()))
        )

    def stream(self, _: torch.device) -> "Recorder":
        return self

    @contextmanager
    def use(self, _: Any) -> Iterator[None]:
        self.calls.append(("stream", None))
        yield
        self.calls.append(("end of stream", None))

    def copy(self, batch: Any, device: torch.device) -> Any:
        assert device.type == "cuda"
        self.calls.append(("copy", self.copies))
        self.copies += 1
        return batch

    def record_event(self) -> int:
        self.calls.append(("event", self.copies - 1))
        return self.copies - 1

    def wait_event(self, event: int) -> None:
        self.calls.append(("wait", event))


def test_a_batch_is_copied_while_the_one_before_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step waits for its own copy, not for the next one, and its memory is kept until its work is done."""
    cuda = Recorder(monkeypatch)
    monkeypatch.setattr(loader, "make_loader", cpu(loader.make_loader))
    plan = EpochPlan(EpochOrder({"type": "sequential"}, Squares(), 0), batch_size=4)
    config = LoaderConfig(prefetch_to_device=True)
    stream = TrainStream(Squares(), plan, config, worker=0, device=torch.device("cuda"))
    seen = []
    for number, step in enumerate(stream.epoch(Position(epoch_size=10))):
        seen.append(step.batches[0]["square"].tolist())
        cuda.calls.append(("step", number))
    assert seen == [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]
    calls = [call for call in cuda.calls if call[0] in ("copy", "wait", "step", "event")]
    copies = [[("copy", number), ("event", number)] for number in range(3)]
    steps = [[("wait", number), ("step", number)] for number in range(3)]
    assert calls == [*copies[0], *copies[1], *steps[0], *copies[2], *steps[1], *steps[2]]
    for number, values in enumerate(seen):
        assert (
            cuda.calls.index(("wait", number)) < cuda.calls.index(("keep", values)) < cuda.calls.index(("step", number))
        )
    for number in range(3):
        at = cuda.calls.index(("copy", number))
        assert cuda.calls[at - 1][0] == "stream" and cuda.calls[at + 2][0] == "end of stream"


def cpu(make: Any) -> Any:
    """`make_loader` for a machine without CUDA, where nothing can be pinned."""
    return lambda batches, config, worker, seed, device, **more: make(
        batches, config, worker, seed, torch.device("cpu"), **more
    )


def test_on_the_cpu_there_is_nothing_to_prefetch(runs: Runs) -> None:
    """The key is accepted, and the numbers are the same."""
    ahead = runs.train("--loader.prefetch_to_device", "true", "--progress.max_steps", "4", name="ahead")
    plain = runs.train("--progress.max_steps", "4", name="plain")
    assert [e["values"] for e in metrics(ahead, "train")] == [e["values"] for e in metrics(plain, "train")]
