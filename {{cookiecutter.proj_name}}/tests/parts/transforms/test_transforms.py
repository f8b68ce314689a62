"""Steps that samples go through when they are read."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from common.data.sections import build_dataset
import train
from tests.conftest import Runs, same
from tests.resume import cut, differing, final, words
from tests.samples import Digits

DATA = Path(train.__file__).parent / "data"


class RandomScale(nn.Module):
    """As the transforms of torchvision: a module, called with one value, that draws from the global generators."""

    def __init__(self, limit: float = 0.1) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, image: Tensor) -> Tensor:
        return image * (1 + self.limit * (random.random() + float(np.random.rand()) + float(torch.rand(()))))


def negative(image: Tensor, brightest: float = 1.0) -> Tensor:
    """Return a transform that is a function."""
    return brightest - image


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a transform of the whole sample."""
    return {**sample, "image": sample["image"] * 2, "twice": sample["image"]}


class Tuples:
    """As the datasets of torchvision: neither `data_dir` nor `mode`, and samples of a picture and a number."""

    def __init__(self, size: int, transform: Any = None) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(np.full((8, 8), index % 256, dtype=np.uint8)), index % 10


def build(kind: str, *transforms: dict[str, Any], **more: Any) -> Any:
    return build_dataset({"type": kind, "transforms": list(transforms), **more}, "train", DATA)


def test_transforms_are_applied_in_turn() -> None:
    """A class, a function with an argument, another key, the whole sample."""
    plain = Digits(DATA, "train")[5]["image"]
    here = "tests.parts.transforms.test_transforms"
    data = build(
        "tests.samples.Digits",
        {"type": f"{here}.negative", "brightest": 3},
        {"type": f"{here}.doubled", "key": None},
        {"type": f"{here}.negative", "key": "twice"},
    )
    assert torch.equal(data[5]["image"], (3 - plain) * 2) and torch.equal(data[5]["twice"], 1 - (3 - plain))
    assert data.classes == Digits.classes and len(data) == 1200
    assert data.random is True  # nothing says that `negative` does not draw


def test_random_transforms_do_not_depend_on_workers_or_resumes(runs: Runs) -> None:
    """Through the user's door: seeded like all that a dataset draws."""
    scale = "{type: tests.parts.transforms.test_transforms.RandomScale, limit: 0.5}"
    kind = "tests.samples.Digits"
    section = f"{{$REPLACE: true, type: {kind}, transforms: [{scale}]}}"  # the dataset itself draws nothing
    more = words("plain", "--dataset.train", section)
    alone = final(runs.train(*more, name="alone"))
    cut(runs, "plain", 5, "--dataset.train", section, "--num_workers", "2")
    assert differing(alone, final(runs.train(*more, "--resume", "auto", name="cut"))) == []
    without = final(runs.train(*words("plain", "--dataset.train", f"{{$REPLACE: true, type: {kind}}}"), name="without"))
    assert not same(alone["latest"]["model"], without["latest"]["model"])
