"""Data as other people's code has it: splits, generators and collate functions made the way tutorials make them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate, random_split

from common.base.errors import UserError, with_notes
from common.build import check_classes, seeded_dataset
from common.config import resolve
from common.config.registry import DATASET_REGISTRY, METRIC_REGISTRY, ORDER_REGISTRY, import_path
from common.data.keyed import KeyedBatches, find_collate
from common.data.order import EpochOrder
from common.distributed import Rank
from tests.conftest import CONFIG, Runs, load
from tests.samples import Digits
from custom.config import Config
from custom.models.conv_model import ConvModel

RNG = np.random.default_rng(0)


class Split(Dataset[dict[str, Tensor]]):
    """One archive, which the constructor divides at random."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        whole: Any = range(100)
        self.part = random_split(whole, [0.8, 0.2])[mode == "val"]

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": torch.tensor(self.part[index])}


def test_a_split_in_the_constructor() -> None:
    """No sample is in both: every set draws the same division."""
    config = resolve(Config, [CONFIG], []).config
    section = {"type": f"{__name__}.Split"}
    train, val = (seeded_dataset(config, split, "", section, Rank()) for split in ("train", "val"))
    assert sorted([*train.part.indices, *val.part.indices]) == list(range(100))


class Collator:
    """Makes its generator in its first call."""

    draw: np.random.Generator | None = None

    def __call__(self, samples: list[Any]) -> Any:
        if self.draw is None:
            self.draw = np.random.default_rng(7)
        return {**default_collate(samples), "noise": torch.from_numpy(self.draw.random(3))}


def test_a_generator_that_collate_makes() -> None:
    """It is seeded from the first batch on: a batch does not depend on those read before."""
    before, fresh = (KeyedBatches(Digits(Path(), "train"), Collator(), 0) for _ in range(2))
    before.__getitems__((0, [0, 1]))
    second = before.__getitems__((0, [2, 3]))
    assert torch.equal(second["noise"], fresh.__getitems__((0, [2, 3]))["noise"])


@ORDER_REGISTRY.register()
def drawn_by_its_own(size: int, seed: int, epoch: int, dataset: Any) -> Any:
    """A weighted choice, with the generator of the module."""
    return RNG.choice(size, size // 2)


def test_an_order_with_its_own_generator() -> None:
    """An epoch has the same samples in a resumed run, which has not drawn those before it."""
    first, resumed = (EpochOrder({"type": "drawn_by_its_own"}, Digits(Path(), "train"), 0) for _ in range(2))
    epochs = [first(epoch).tolist() for epoch in range(3)]
    assert epochs[1] != epochs[2]
    assert resumed(2).tolist() == epochs[2]


class Counting(ConvModel):
    """Counts its forward passes, as the observers of quantization do in evaluation too."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width=width)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, image: Tensor) -> Tensor:
        assert isinstance(self.passes, Tensor)
        self.passes += 1
        return super().forward(image)


@pytest.mark.parametrize("often", ["1", "1step"])
def test_an_evaluation_changes_no_buffer(runs: Runs, often: str) -> None:
    """So training does not depend on how often the model is evaluated, or resumed."""
    words = ["--model", f"{{$REPLACE: true, type: {__name__}.Counting}}", "--progress.epoch_val", often]
    runs.train(*words, "--progress.epoch", "1")
    folder = runs.train(*words, "--progress.epoch", "2", "--resume", "auto")
    state = load(folder)
    assert state["model"]["passes"] == state["position"]["step"] == 10


def any_keywords(**kwargs: Any) -> Any:
    """As a wrapper in the project has them."""


def test_keywords_that_a_foreign_function_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets what its section says, and nothing of ours; a function of the project, which passes them on, all."""
    assert DATASET_REGISTRY.find_supplied(any_keywords) == ()  # these tests are outside the project
    monkeypatch.setattr(any_keywords, "__module__", "custom.config")
    assert DATASET_REGISTRY.find_supplied(any_keywords) == ("data_dir", "mode")
    assert DATASET_REGISTRY.find_supplied(json.dumps) == ()
    assert DATASET_REGISTRY.find_supplied(nn.Module) == ()


class Named(Digits):
    """Attributes that other code gives other meanings."""

    classes: Any = 10

    def collate_fn(self, samples: list[Any]) -> Any:
        return "collated"


def test_attributes_of_another_meaning() -> None:
    """`classes` is their number; the function that makes batches is called as torch's argument."""
    dataset: Any = Named(Path(), "train")
    assert check_classes({"type": "ConvModel"}, {"dataset.train": dataset}) == ()
    assert find_collate(dataset, None)([]) == "collated"


def test_an_error_in_a_constructor() -> None:
    """It names what was being built, since the text is of other code: no key of the config is in it."""
    section = {"type": "torch.nn.Conv2d", "in_channels": 3, "out_channels": 4, "kernel_size": 3, "groups": 2}
    with pytest.raises(ValueError, match="must be divisible by groups") as caught:
        METRIC_REGISTRY.build(section)
    assert with_notes(caught.value).endswith("\n  in building the metric torch.nn.Conv2d")


def test_a_name_that_a_module_lacks() -> None:
    """A close one, or those that it has."""
    with pytest.raises(UserError, match=r"no attribute 'Liner'; did you mean Linear\?"):
        import_path("torch.nn.Liner")
    with pytest.raises(UserError, match=r"no attribute 'Network'; it has: JSONDecodeError, "):
        import_path("json.Network")


def stored(graphs: list[Any]) -> Any:
    """As `InMemoryDataset.collate` of torch_geometric, which makes the form in which graphs are stored."""


def test_a_collate_that_makes_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset: Any = Digits(Path(), "train")
    dataset.collate = stored
    assert find_collate(dataset, None) is stored
    monkeypatch.setattr(stored, "__module__", "torch_geometric.data.in_memory_dataset")
    assert find_collate(dataset, None) is default_collate
