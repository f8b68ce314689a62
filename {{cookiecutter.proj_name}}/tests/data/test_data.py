"""Order, shares and randomness of the training data."""

import dataclasses
import random
from collections import UserDict, defaultdict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data._utils.pin_memory import pin_memory

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.data.keyed import KeyedBatches
from common.data.loader import EvaluationLoader, LoaderConfig, TrainStream
from common.data.move import Loaded, to_device
from common.data.order import EpochOrder
from common.data.plan import EpochPlan, evaluation_keys
from common.data.view import View
from common.distributed import Rank
from common.optim.precision import Precision
from common.progress import Position
from tests.conftest import Runs, load, same
from tests.parts import Graph

CPU = torch.device("cpu")


def shuffled(size: int, seed: int = 0) -> EpochOrder:
    """The usual order of a data set with `size` samples."""
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
    plan = EpochPlan(shuffled(len(dataset), seed), batch_size=batch_size, accumulate=accumulate)
    return TrainStream(dataset, plan, LoaderConfig(), worker=worker, device=CPU)


def seen(stream: TrainStream, at: Position) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for step in stream.epoch(at):
        for batch in step.batches:
            found.update(zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True))
    return found


def test_items_depend_on_seed_epoch_and_index_alone() -> None:
    """R-35, D-67: two epochs differ, two runs agree; the number of workers and the place of a resume change nothing."""
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


def test_reading_leaves_the_loops_own_streams_alone() -> None:
    """Dropout must not depend on whether batches are read in this process."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    seen(stream_of(Noisy()), Position())
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


def test_random_batches_are_keyed_too() -> None:
    """A collate function that draws (mixup) gives the same batch wherever it runs."""

    def collate(items: list[Any]) -> Tensor:
        return torch.rand(2)

    make = lambda: KeyedBatches(Noisy(), collate, seed=3).__getitems__((0, [4, 5]))  # noqa: E731
    assert torch.equal(make(), make())
    assert not torch.equal(make(), KeyedBatches(Noisy(), collate, seed=3).__getitems__((1, [4, 5])))


Tensor = torch.Tensor


@pytest.mark.parametrize(
    ("size", "batch", "accumulate", "world"), [(23, 4, 1, 1), (21, 2, 3, 2), (7, 2, 1, 3), (5, 4, 2, 3), (24, 4, 2, 3)]
)
def test_every_sample_once_and_weighted_alike(size: int, batch: int, accumulate: int, world: int) -> None:
    """QQ-23: whatever the ranks and windows, weights give the mean over the samples of each window, last included."""
    plans = [
        EpochPlan(shuffled(size, 5), batch_size=batch, accumulate=accumulate, rank=rank, world_size=world)
        for rank in range(world)
    ]
    used: list[int] = []
    windows = [list(plan.global_batches(Position(epoch=2))) for plan in plans]
    assert len({len(each) for each in windows}) == 1 == len({plan.steps_per_epoch for plan in plans})
    assert len(windows[0]) == plans[0].steps_per_epoch
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
    """R-60: the place in the data is one number, valid for any split."""

    def read(plan: EpochPlan, sample: int) -> list[int]:
        return [
            index
            for each in plan.global_batches(Position(sample=sample))
            for indices in each.indices
            for index in indices
        ]

    whole = read(EpochPlan(shuffled(50, 1), batch_size=4), 0)
    plans = [EpochPlan(shuffled(50, 1), batch_size=2, rank=rank, world_size=3) for rank in range(3)]
    rest = [index for plan in plans for index in read(plan, 20)]
    assert sorted(rest) == sorted(whole[20:])


def test_drop_last_leaves_out_the_last_window_only_when_not_full() -> None:
    dropped = EpochPlan(shuffled(10), batch_size=4, drop_last=True)
    assert (
        [window.samples for window in dropped.global_batches(Position())]
        == [4, 4]
        == [len(indices) for each in dropped.global_batches(Position()) for indices in each.indices]
    )
    assert list(dropped.global_batches(Position()))[-1].after.epoch == 1
    assert EpochPlan(shuffled(8), batch_size=4, drop_last=True).steps_per_epoch == 2
    with pytest.raises(UserError, match="no optimizer step: 3 samples, but one step takes 4"):
        EpochPlan(shuffled(3), batch_size=4, drop_last=True)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_evaluation_covers_each_sample_once_in_order(world: int) -> None:
    """D-02, R-66: no shuffling, no padding, uneven shares; a rank may have none."""
    shares = [[index for keys in evaluation_keys(7, 2, rank, world) for index in keys[1]] for rank in range(world)]
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
    """R-39: `module:function`, the data set's own method, PyTorch's default."""

    class Own(Noisy):
        def collate(self, items: list[Any]) -> int:
            return len(items)

    def first(dataset: Any, config: LoaderConfig) -> Any:
        return next(iter(EvaluationLoader(dataset, config, batch_size=4, worker=0, rank=Rank(), seed=0)))

    assert set(first(Noisy(), LoaderConfig())) == {"index", "noise"}
    assert first(Own(), LoaderConfig()) == 4
    assert first(Own(), LoaderConfig(collate="builtins:tuple"))[0]["index"] == 0
    assert first(View(Own(), limit=2), LoaderConfig()) == 2


def test_batches_of_any_nesting_are_moved() -> None:
    """R-18, CT-35: dicts, lists, tuples, named tuples and dataclasses."""
    from collections import namedtuple
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Boxes:
        corners: Tensor
        name: str

    Pair = namedtuple("Pair", ["left", "right"])
    batch = {
        "a": [torch.ones(3, 1)],
        "b": Pair(torch.ones(3), "text"),
        "c": Boxes(torch.ones(3, 4), "x"),
        "d": (1, None),
    }
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert doubled["a"][0].tolist() == [[2.0]] * 3
    assert (doubled["b"].left[0], doubled["b"].right) == (2.0, "text")
    assert (doubled["c"].corners.sum(), doubled["c"].name, doubled["d"]) == (24.0, "x", (1, None))


class Encoding(UserDict[str, Any]):
    """A mapping that moves itself, as the tokenizers of transformers give."""

    def __init__(self, values: dict[str, Any], text: str = "") -> None:
        super().__init__(values)
        self.text = text

    def to(self, device: torch.device) -> "Encoding":
        return Encoding({key: value.to(device) for key, value in self.items()}, self.text)


class Locked(dict[str, Any]):
    """A dict with a method that refuses to work, as the outputs of transformers have."""

    def update(self, *_: Any) -> None:  # type: ignore[override]
        raise AssertionError


@dataclasses.dataclass(frozen=True)
class Boxes:
    corners: Tensor
    scale: dataclasses.InitVar[float]
    area: Tensor = dataclasses.field(init=False)
    later: Tensor = dataclasses.field(init=False)

    def __post_init__(self, scale: float) -> None:
        object.__setattr__(self, "area", self.corners.sum() * scale)


@dataclasses.dataclass
class Scene:
    """A dataclass with others in it."""

    boxes: list[Boxes]
    image: Tensor


def one_tensor(kind: str, tensor: Tensor) -> Any:
    """A batch of one kind with one tensor of shape (3, 2)."""
    return {
        "dict": lambda: {"a": tensor, "b": (1, None)},
        "defaultdict": lambda: defaultdict(list, a=tensor),
        "UserDict": lambda: UserDict(a=tensor),
        "Encoding": lambda: Encoding({"a": tensor}, "text"),
        "Locked": lambda: Locked(a=tensor),
        "MappingProxyType": lambda: MappingProxyType({"a": tensor}),
        "Graph": lambda: [Graph(a=tensor)],
        "Boxes": lambda: (Boxes(tensor, 0.5),),
        "Scene": lambda: Scene([Boxes(tensor, 0.5)], tensor),
        "PackedSequence": lambda: pack_sequence([tensor[:2], tensor[2:]]),
    }[kind]()


FOUND = {
    "dict": lambda batch: [batch["a"]],
    "defaultdict": lambda batch: [batch["a"], *batch["none"]],
    "UserDict": lambda batch: [batch["a"]],
    "Encoding": lambda batch: [batch["a"]],
    "Locked": lambda batch: [batch["a"]],
    "MappingProxyType": lambda batch: [batch["a"]],
    "Graph": lambda batch: [batch[0]["a"]],
    "Boxes": lambda batch: [batch[0].corners, batch[0].area],
    "Scene": lambda batch: [batch.boxes[0].corners, batch.boxes[0].area, batch.image],
    "PackedSequence": lambda batch: [batch.data],
}


@pytest.mark.parametrize("kind", FOUND)
def test_batches_of_any_kind_are_moved_cast_and_pinned(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here `meta` stands for a GPU. The batch itself stays as it is, and its copy is of the same kind."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor + 1)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: False)
    meta, batch = torch.device("meta"), one_tensor(kind, torch.zeros(3, 2))
    moved, cast = to_device(batch, meta), Precision("fp64", "cpu").cast_batch(batch)
    pinned = pin_memory(Loaded(batch)).batch
    assert {each.device for each in FOUND[kind](moved)} == {meta}
    assert {each.dtype for each in FOUND[kind](cast)} == {torch.float64}
    assert all((each == 1).all() for each in FOUND[kind](pinned))
    assert {(each.device, each.dtype, float(each.sum())) for each in FOUND[kind](batch)} == {(CPU, torch.float32, 0.0)}
    kinds = {type(each) for each in (batch, moved, cast, pinned)}
    assert kinds == ({dict, MappingProxyType} if kind == "MappingProxyType" else {type(batch)})
    if kind == "Encoding":
        assert moved.text == cast.text == pinned.text == "text"
    if kind == "PackedSequence":
        assert moved.batch_sizes.device == cast.batch_sizes.device == CPU
        assert cast.batch_sizes.dtype == torch.int64


@pytest.mark.parametrize("collate", ["as_mapping", "as_object"])
def test_batches_of_any_kind_in_double_precision(runs: Runs, collate: str) -> None:
    """The same training as with dicts."""
    words = ["--precision.mode", "fp64", "--progress.max_steps", "2"]
    usual = load(runs.train(*words, name="usual"))
    other = load(runs.train(*words, "--loader.collate", f"tests.parts:{collate}", name="other"))
    assert same(usual["model"], other["model"])


def test_only_tensors_on_the_cpu_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a data set has brought to the GPU itself; PyTorch refuses to pin it. Here `meta` stands for the GPU."""
    pinned: list[torch.device] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.device)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = {"image": torch.ones(2, device="meta"), "label": torch.ones(2)}
    loaded = pin_memory(Loaded(batch))
    assert pinned == [CPU]
    assert loaded.batch["image"].device.type == "meta"
