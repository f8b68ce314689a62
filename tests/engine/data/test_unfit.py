"""Samples and models that a run cannot use as they are: said before the first step."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.conftest import ErrorOf, Runs, load, same
from tests.samples import Digits

HERE = "engine.data.test_unfit"


class Unfit(Digits):
    """Digits of which some do not fit to the others."""

    def __init__(self, data_dir: Path, mode: str, how: str) -> None:
        super().__init__(data_dir, mode)
        self.how = how

    def __getitem__(self, index: int) -> Any:
        sample: dict[str, Any] = {**super().__getitem__(index)}
        if index % 4 != 1:
            return sample
        image, label = sample["image"], sample["label"]
        changed = {
            "none": None,
            "empty": {"image": image, "label": None},
            "lacks": {"image": image},
            "more": {**sample, "mask": image},
            "size": {"image": torch.zeros(1, 9, 8), "label": label},
            "text": {"image": image, "label": "three"},
            "tuple": (image, label),
        }
        return changed[self.how]


class Lazy(nn.Module):
    """A model whose first layer has no shape yet."""

    def __init__(self, shaped: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
        if shaped:
            self.layers(torch.zeros(1, 1, 8, 8))

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


@pytest.mark.parametrize(
    ("how", "message", "workers"),
    [
        ("none", r"NoneType", "0"),
        ("empty", r"NoneType", "1"),
        ("lacks", r"KeyError: 'label'", "0"),
        ("more", r"KeyError: 'mask'", "0"),
        ("size", r"equal size, but got \[1, 8, 8\] at entry 0 and \[1, 9, 8\] at entry 1", "1"),
        ("text", r"\w+Error: .*str", "0"),
        ("tuple", r"TypeError", "0"),
    ],
)
def test_samples_that_make_no_batch(error_of: ErrorOf, how: str, message: str, workers: str) -> None:
    """They are named, with the reason."""
    section = f"{{$REPLACE: true, type: engine.data.test_unfit.Unfit, how: {how}}}"
    words = ["--dataset.train", section, "--loader.order", "{type: sequential}", "--num_workers", workers]
    assert re.search(f"no batch can be made of samples 0, 1, .*of Unfit: .*{message}", error_of(*words))


def nothing(items: list[Any]) -> None:
    """A collate function without a return."""


def test_a_collate_function_that_returns_nothing(error_of: ErrorOf) -> None:
    text = error_of("--loader.collate", "engine.data.test_unfit:nothing")
    assert "the collate function of DigitsDataset returned None; it must return a batch" in text


def test_a_model_without_shapes(runs: Runs, error_of: ErrorOf) -> None:
    """Refused by name; a model that was called once is trained."""
    name = "engine.data.test_unfit.Lazy"
    text = error_of("--model", f"{{$REPLACE: true, type: {name}, shaped: false}}")
    assert "layers.1.weight, layers.1.bias: lazy modules have no shape yet" in text
    runs.train("--model", f"{{$REPLACE: true, type: {name}, shaped: true}}", "--progress.max_steps", "1")


def noisy(items: list[Any]) -> Any:
    """A collate function that draws, and says so."""
    batch = default_collate(items)
    batch["image"] = batch["image"] + 0.1 * torch.rand_like(batch["image"])
    return batch


noisy.random = True  # type: ignore[attr-defined]


class Steady(Digits):
    """Draws nothing, and has no collate function of its own."""

    random = False
    collate = None


@pytest.mark.parametrize("words", [[], ["--loader.collate", f"{HERE}.noisy"]], ids=["none", "noisy"])
def test_a_collate_function_of_ones_own_or_none(runs: Runs, words: list[str]) -> None:
    """What it draws does not depend on the workers."""
    more = ["--dataset.train", f"{{type: {HERE}.Steady}}", "--progress.max_steps", "3", *words]
    alone = runs.train(*more, name="alone")
    helped = runs.train(*more, "--num_workers", "1", name="helped")
    assert same(load(alone)["model"], load(helped)["model"])
