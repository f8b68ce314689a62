"""Order, shares and randomness of the training data."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.base.errors import UserError
from common.data.loader import EvaluationLoader, LoaderConfig, TrainStream
from common.data.order import EpochOrder, EpochPlan
from common.data.view import View
from common.distributed import Rank
from common.progress import Position
import train

DATA = Path(train.__file__).parent / "data"
CPU = torch.device("cpu")


def shuffled(size: int, seed: int = 0) -> EpochOrder:
    """Return the usual order of a dataset with `size` samples."""
    return EpochOrder({"type": "shuffle"}, range(size), seed)


class Noisy:
    """Items that depend on all three global generators, as ordinary augmentation does."""

    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))], dtype=torch.float64)
        return {"index": index, "noise": noise}


def stream_of(dataset: Any, *, worker: int = 0, batch_size: int = 3, accumulate: int = 1, seed: int = 7) -> TrainStream:
    order = shuffled(len(dataset), seed)
    plan = EpochPlan(order.size, batch_size=batch_size, accumulate=accumulate)
    return TrainStream(dataset, order, plan, LoaderConfig(), worker=worker, device=CPU)


def seen(stream: TrainStream, at: Position) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for step in stream.epoch(at):
        for batch in step.batches:
            found.update(zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True))
    return found


def test_items_depend_on_seed_epoch_and_index_alone() -> None:
    """Two epochs differ, two runs agree; the number of workers and the place of a resume change nothing."""
    alone = stream_of(Noisy())
    first, second = seen(alone, Position()), seen(alone, Position(epoch=1))
    assert sorted(first) == list(range(10))
    assert all(first[index] != second[index] for index in first)
    with_workers = stream_of(Noisy(), worker=2)
    assert seen(with_workers, Position()) == first
    assert seen(with_workers, Position(epoch=1)) == second  # the same, persistent, workers
    rest = seen(alone, Position(step=2, sample=6))
    assert len(rest) == 4
    assert all(first[index] == noise for index, noise in rest.items())
    assert seen(stream_of(Noisy(), seed=8), Position()) != first


@pytest.mark.parametrize(
    ("size", "batch", "accumulate", "world"), [(23, 4, 1, 1), (21, 2, 3, 2), (7, 2, 1, 3), (5, 4, 2, 3), (24, 4, 2, 3)]
)
def test_every_sample_once_and_weighted_alike(size: int, batch: int, accumulate: int, world: int) -> None:
    """Whatever the ranks and windows, weights give the mean over the samples of each window, last included."""
    plans = [
        EpochPlan(size, batch_size=batch, accumulate=accumulate, rank=rank, world_size=world) for rank in range(world)
    ]
    used: list[int] = []
    windows = [list(plan.global_batches(shuffled(size, 5)(2), Position(epoch=2))) for plan in plans]
    assert len({len(each) for each in windows} | {plan.steps_per_epoch for plan in plans}) == 1
    for number in range(len(windows[0])):
        share_of: dict[int, float] = {}
        assert len({len(each[number].sizes) for each in windows}) == 1  # they exchange weights in each (FSDP)
        for rank in range(world):
            window = windows[rank][number]
            for size_of, weight, indices in zip(window.sizes, window.weights, window.indices, strict=True):
                assert size_of == len(indices) * bool(weight) <= batch
                for index in indices[:size_of]:
                    share_of[index] = share_of.get(index, 0.0) + weight / size_of / world
        assert len(share_of) == windows[0][number].samples
        assert all(share == pytest.approx(1 / len(share_of)) for share in share_of.values())
        used += share_of
    assert sorted(used) == list(range(size))
    assert windows[0][-1].after == Position(step=len(windows[0]), epoch=3, sample=0, epoch_size=size)


def test_resume_continues_with_the_samples_not_yet_seen_for_any_number_of_ranks() -> None:
    """The place in the data is one number, valid for any split."""

    def read(plan: EpochPlan, sample: int) -> list[int]:
        return [
            index
            for each in plan.global_batches(shuffled(50, 1)(0), Position(sample=sample))
            for indices in each.indices
            for index in indices
        ]

    whole = read(EpochPlan(50, batch_size=4), 0)
    plans = [EpochPlan(50, batch_size=2, rank=rank, world_size=3) for rank in range(3)]
    rest = [index for plan in plans for index in read(plan, 20)]
    assert sorted(rest) == sorted(whole[20:])


def evaluation_shares(size: int, batch_size: int, world: int) -> list[list[list[int]]]:
    """Return the samples of each batch that each rank evaluates."""
    shares = []
    for number in range(world):
        rank = Rank(rank=number, world_size=world)
        loader = EvaluationLoader(range(size), LoaderConfig(), batch_size=batch_size, worker=0, rank=rank, seed=0)
        shares.append([indices for _, indices in loader.keys])
    return shares


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_evaluation_covers_each_sample_once_in_order(world: int) -> None:
    """No shuffling, no padding, uneven shares; a rank may have none."""
    shares = [[index for batch in share for index in batch] for share in evaluation_shares(7, 2, world)]
    assert sorted(index for share in shares for index in share) == list(range(7))
    assert all(share == sorted(share) for share in shares)


class Broken(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise UserError("the file six.png is broken")
        if index == 3:
            raise OSError("no such file")
        return {"index": index}


@pytest.mark.parametrize("worker", [0, 1])
def test_an_unreadable_sample_is_named(worker: int) -> None:
    """A mistake of the user keeps its own words, an error of the code gets the sample's number, with workers too."""
    loader = EvaluationLoader(Broken(), LoaderConfig(), batch_size=3, worker=worker, rank=Rank(), seed=0)
    batches = iter(loader)
    assert next(batches)["index"].tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="sample 3 of Broken cannot be read: OSError: no such file"):
        next(batches)
    loader = EvaluationLoader(FirstSamplesFrom6(), LoaderConfig(), batch_size=3, worker=worker, rank=Rank(), seed=0)
    with pytest.raises(UserError, match=r"^the file six.png is broken$"):
        list(loader)


class FirstSamplesFrom6(Broken):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index + 6)


def test_collate_by_path_by_data_set_or_by_default() -> None:
    """`module:function`, the dataset's own method, PyTorch's default."""

    class Own(Noisy):
        def collate(self, items: list[Any]) -> int:
            return len(items)

    def first(dataset: Any, config: LoaderConfig) -> Any:
        return next(iter(EvaluationLoader(dataset, config, batch_size=4, worker=0, rank=Rank(), seed=0)))

    assert set(first(Noisy(), LoaderConfig())) == {"index", "noise"}
    assert first(Own(), LoaderConfig()) == 4
    assert first(Own(), LoaderConfig(collate="copy:copy"))[0]["index"] == 0
    assert first(View(Own(), limit=2), LoaderConfig()) == 2
