"""`transforms` in a dataset's section, and batches of mixed images."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from common.data.keyed import KeyedBatches, find_collate
from common.data.sections import build_dataset
import train
from library.data.mix_collate import CutMix, Mixup
from library.data.sample_transform import ToFloat
from tests.conftest import Runs, metrics, same
from tests.resume import differing, final, same_after_cut, words
from tests.samples import CrossEntropy, Digits

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


class Items:
    """Iterates over digits."""

    random = False

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.digits = Digits(data_dir, mode)

    def __iter__(self) -> Any:
        return (self.digits[index] for index in range(96))


def build(kind: str, *transforms: dict[str, Any], **more: Any) -> Any:
    return build_dataset({"type": kind, "transforms": list(transforms), **more}, "train", DATA)


def test_transforms_are_applied_in_turn() -> None:
    """A class, a function with an argument, another key, the whole sample."""
    plain = Digits(DATA, "train")[5]["image"]
    here = "tests.data.test_transforms"
    data = build(
        "tests.samples.Digits",
        {"type": f"{here}.negative", "brightest": 3},
        {"type": f"{here}.doubled", "key": None},
        {"type": f"{here}.negative", "key": "twice"},
    )
    assert torch.equal(data[5]["image"], (3 - plain) * 2) and torch.equal(data[5]["twice"], 1 - (3 - plain))
    assert data.classes == Digits.classes and len(data) == 1200
    assert data.random is True  # nothing says that `negative` does not draw
    assert build("tests.samples.Digits", {"type": "Normalize", "mean": [0.5], "std": [1.0]}).random is False


def test_a_data_set_made_for_no_project() -> None:
    """By import path: it gets neither `data_dir` nor `mode`; its tuples become dicts of tensors."""
    kind = "tests.data.test_transforms.Tuples"
    data = build(kind, {"type": "Named", "names": ["image", "label"]}, {"type": "ToFloat"}, size=40)
    assert set(data[30]) == {"image", "label"} and data[30]["label"] == 0
    assert data[30]["image"].shape == (1, 8, 8) and float(data[30]["image"][0, 0, 0]) == pytest.approx(30 / 255)
    colours = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert torch.equal(ToFloat()(Image.fromarray(colours))[1] * 255, torch.tensor(colours[..., 1]).float())


@pytest.mark.parametrize("kind", ["tests.samples.Digits", "tests.data.test_transforms.Items"])
def test_random_transforms_do_not_depend_on_workers_or_resumes(runs: Runs, kind: str) -> None:
    """Through the user's door: seeded like all that a dataset draws, map-style or not."""
    scale = "{type: tests.data.test_transforms.RandomScale, limit: 0.5}"
    section = f"{{$REPLACE: true, type: {kind}, transforms: [{scale}]}}"  # the dataset itself draws nothing
    more = words("plain", "--dataset.train", section)
    alone = final(same_after_cut(runs, "plain", *more, at=5, promised=not kind.endswith("Items"))[0])
    assert differing(alone, final(runs.train(*more, "--num_workers", "2", name="workers"))) == []
    without = final(runs.train(*words("plain", "--dataset.train", f"{{$REPLACE: true, type: {kind}}}"), name="without"))
    assert not same(alone["latest"]["model"], without["latest"]["model"])


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_mixed_batches(name: str) -> None:
    """Images and labels are mixed in the same shares; a batch is a function of its seed."""
    data = Digits(DATA, "train")
    collate = find_collate(data, {"type": name, "alpha": 1.0}, training=True)
    make = lambda key: KeyedBatches(data, collate, seed=3).__getitems__(key)  # noqa: E731
    indices = list(range(8))
    batch = make((0, indices))
    assert same(batch, make((0, indices))) and not same(batch, make((1, indices)))
    assert batch["image"].shape == (8, 1, 8, 8) and batch["soft_label"].shape == (8, 10)
    torch.testing.assert_close(batch["soft_label"].sum(1), torch.ones(8))
    assert torch.equal(batch["label"], batch["soft_label"].argmax(1))
    plain = data.images[:8]
    assert not torch.equal(batch["image"], plain) and batch["image"].max() <= 1
    soft = batch["soft_label"]
    logits = torch.randn(8, 10)
    expected = -(soft * logits.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(CrossEntropy()({"logits": logits}, batch), expected)
    # The mean image is mixed from the same parts.
    assert find_collate(data, {"type": name}) is torch.utils.data.default_collate  # evaluation: nothing is mixed


def test_shares_of_mixed_images() -> None:
    first, second = torch.zeros(2, 1, 10, 10), torch.ones(2, 1, 10, 10)
    data = Digits(DATA, "train")
    mixed, share = Mixup(data).mix(first, second, 0.3)
    assert share == 0.3 and torch.allclose(mixed, torch.tensor(0.7))
    for seed in range(20):
        np.random.seed(seed)
        mixed, share = CutMix(data).mix(first, second, 0.6)
        assert share == pytest.approx(1 - float(mixed[0].mean())) and share >= 0.55
        assert torch.equal(mixed[0], mixed[1])
    assert first.sum() == 0


@pytest.mark.slow
def test_a_run_with_mixed_batches_resumes_and_evaluates_as_before(runs: Runs) -> None:
    """Training only, the same with workers and after a resume, on a dataset that draws nothing itself."""
    losses = "{$REPLACE: true, CrossEntropyLoss: {type: tests.samples.CrossEntropy}, ce: {type: tests.small.Mortal}}"
    base = words("plain", "--dataset.train", "{type: tests.samples.Digits}", "--loss", losses, "--optim.lr", "1e-99",
 "--model", "{type: tests.small.Plain}")  # fmt: skip
    mixed = [*base, "--loader.collate", "{type: mixup, alpha: 0.4}"]
    plain, alone = runs.train(*base, name="plain"), runs.train(*mixed, name="alone")
    values = [final(folder)["latest"]["values"] for folder in (plain, alone)]
    assert same(*values)  # with next to no rate, evaluations of both are alike
    learning = [word if word != "1e-99" else "0.01" for word in mixed]
    first = final(same_after_cut(runs, "plain", *learning, at=5)[0])
    assert differing(first, final(runs.train(*learning, "--num_workers", "2", name="second"))) == []
    entries = [[entry["values"] for entry in metrics(runs.root / name, "train")] for name in ("uncut", "plain")]
    assert (
        entries[0][0]["CrossEntropyLoss"] != entries[0][0]["ce"]
        and entries[1][0]["CrossEntropyLoss"] == entries[1][0]["ce"]
    )
