"""Order, shares and randomness of the training data."""

import dataclasses
import random
from collections import UserDict, defaultdict
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data._utils.pin_memory import pin_memory

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.data.held import OwnGenerators
from common.data.keyed import KeyedBatches
from common.data.loader import to_device
from common.data.order import EpochPlan
from common.data.workers import Loaded
from common.optim.precision import Precision
from common.progress import Position
from tests.conftest import Runs, load, same
from tests.data.test_data import CPU, Noisy, seen, shuffled, stream_of
from tests.small import Graph


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


def test_drop_last_leaves_out_the_last_window_only_when_not_full() -> None:
    dropped = EpochPlan(10, batch_size=4, drop_last=True)
    steps = list(dropped.global_batches(shuffled(10)(0), Position()))
    assert [step.samples for step in steps] == [4, 4] == [len(each) for step in steps for each in step.indices]
    assert steps[-1].after.epoch == 1
    assert EpochPlan(8, batch_size=4, drop_last=True).steps_per_epoch == 2
    with pytest.raises(UserError, match="no optimizer step: 3 samples, but one step takes 4"):
        EpochPlan(3, batch_size=4, drop_last=True)


def test_batches_of_any_nesting_are_moved() -> None:
    """Dicts, lists, tuples, named tuples and dataclasses."""
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
    """Return a batch of one kind with one tensor of shape (3, 2)."""
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
    other = load(runs.train(*words, "--loader.collate", f"tests.small:{collate}", name="other"))
    assert same(usual["model"], other["model"])


def test_only_tensors_on_the_cpu_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dataset has brought to the GPU itself; PyTorch refuses to pin it. Here `meta` stands for the GPU."""
    pinned: list[torch.device] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.device)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = {"image": torch.ones(2, device="meta"), "label": torch.ones(2)}
    loaded = pin_memory(Loaded(batch))
    assert pinned == [CPU]
    assert loaded.batch["image"].device.type == "meta"


@pytest.mark.parametrize(("batch_size", "full", "samples"), [(1, False, 1), (3, False, 2), (3, True, 3)])
def test_a_batch_to_try_a_model_on(batch_size: int, full: bool, samples: int) -> None:
    """Never more samples than a batch has: they may not fit together, or into memory."""
    batch = stream_of(Noisy(), batch_size=batch_size).sample_batch(full=full)
    assert len(batch["index"]) == samples


def test_a_batch_may_be_prepared_again() -> None:
    """As several updates, closures and pictures do: what a task puts in the result is not in the loaded batch."""
    loaded = {"image": torch.ones(2)}
    for _ in range(2):
        prepared = to_device(loaded, torch.device("cpu"))
        prepared["image"] = prepared["image"] * 3
        assert prepared["image"].tolist() == [3.0, 3.0]


def test_generators_beside_long_lists() -> None:
    """A long list of samples, each a dict with lists, does not hide the transform that draws."""
    jitter = SimpleNamespace(rng=np.random.default_rng(0))
    samples = [{"path": str(number), "boxes": [[0, 1, 2, 3]] * 5} for number in range(3000)]
    found = OwnGenerators(SimpleNamespace(samples=samples, steps=[SimpleNamespace(jitter=jitter)]))
    assert found.names == ["SimpleNamespace.rng"]
