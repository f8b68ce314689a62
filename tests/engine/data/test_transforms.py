"""`transforms` in a dataset's section, and batches of mixed images."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from common.base.errors import UserError
from common.data.keyed import KeyedBatches, find_collate
from common.data.loader import EvaluationLoader, LoaderConfig
from common.data.sections import build_dataset
from common.data.view import original
from common.distributed import Rank
from tests.conftest import ErrorOf, Runs
from tests.data.test_transforms import DATA, build
from custom.datasets.digits_dataset import DigitsDataset
from custom.tasks.classification_task import ClassificationTask

GREY = "{type: Normalize, mean: [-1.0], std: [2.0]}"  # black becomes grey


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        ({"type": "ToFloat"}, "ToFloat: got a Tensor"),
        ({"type": "ToFloat", "key": "picture"}, "transforms[0] (ToFloat): a sample has no 'picture'"),
        ({"type": "Named", "names": ["a"]}, "Named: a sample has 2 parts"),
        ({"type": "Normalize", "mean": [0, 0], "std": [1, 1]}, "Normalize: image has 1 channels, but mean has 2"),
        ({"type": "Normalize", "mean": [0], "std": [1], "key": "x"}, "Normalize: a sample has no 'x'"),
        ({"type": "Normalize", "mean": [0], "std": [0]}, "std more than 0"),
    ],
)
def test_a_transform_that_does_not_fit(transform: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        build("DigitsDataset", transform)[0]
    assert words in str(error.value)


def test_an_error_in_a_transform_names_it_and_the_sample() -> None:
    negative_ = {"type": "tests.data.test_transforms.negative", "brightest": 1, "key": None}
    data = build_dataset({"type": "DigitsDataset", "transforms": [negative_]}, "train", DATA, limit=9)
    where = r"sample 7 of DigitsDataset cannot be read: .*transforms\[0\] \(tests.*negative\): TypeError"
    with pytest.raises(RuntimeError, match=where):
        KeyedBatches(data, find_collate(data, None), seed=0).__getitems__((0, [7]))


def test_mistakes_in_the_config_are_reported_together(error_of: ErrorOf) -> None:
    text = error_of(
        "--dataset.train.transforms", "[{type: Normalise, mean: [0]}, {type: Normalize, mean: 0, std: [1], key: 3}]",
        "--dataset.val.transforms", "Normalize", "--loader.collate", "{type: mixup, alhpa: 1}",
    )  # fmt: skip
    assert "5 problems" in text
    assert "dataset.train.transforms[0].type = 'Normalise'" in text and "did you mean Normalize?" in text
    assert "dataset.train.transforms[1].mean = 0" in text and "must be a list" in text
    assert "dataset.train.transforms[1].key = 3" in text and "or null for all of it" in text
    assert "dataset.val.transforms = 'Normalize'" in text and "must be a list of sections" in text
    assert "loader.collate.alhpa = 1" in text and "did you mean alpha?" in text


class FirstSamples(ClassificationTask):
    """Draws the same samples whatever the model predicts."""

    def sample_errors(self, output: Any, batch: Any) -> Any:
        return None


def test_pictures_show_the_colours_of_before(runs: Runs, evaluated: Any) -> None:
    """`Normalize` is undone for pictures, in training and in evaluate.py; the model gets normalised images."""
    batch = next(iter(EvaluationLoader(
        build("DigitsDataset", {"type": "Normalize", "mean": [0.25], "std": [0.5]}),
        LoaderConfig(), batch_size=3, worker=0, rank=Rank(), seed=0,
    )))  # fmt: skip
    plain = torch.stack([DigitsDataset(DATA, "train")[index]["image"] for index in range(3)])
    torch.testing.assert_close(batch["image"], (plain - 0.25) / 0.5)
    torch.testing.assert_close(original(batch), plain)
    assert original({"image": plain}) is plain
    pictures = {}
    for name, transforms in (("plain", "[]"), ("normal", f"[{GREY}]")):
        sections = "".join(f"{split}: {{transforms: {transforms}}}, " for split in ("train", "val", "eval"))
        folder = runs.train(
            "--dataset", f"{{{sections}}}", "--pictures.files", "true", "--pictures.every", "3",
            "--progress.epoch", "1", "--task.type", f"{__name__}.FirstSamples", name=name,
        )  # fmt: skip
        evaluated(folder / "checkpoints" / "latest.pt")
        pictures[name] = [path for part in ("progress/train", "progress/val", "eval")
                          for path in sorted((folder / part).rglob("*.png"))]  # fmt: skip
    assert len(pictures["plain"]) > 10
    for one, other in zip(pictures["plain"], pictures["normal"], strict=True):
        # Frame and text depend on the prediction, the digit does not.
        first, second = (np.asarray(Image.open(path).convert("L")).astype(int) for path in (one, other))
        assert first.shape == second.shape and np.mean(np.abs(first - second) > 2) < 0.4


def test_mixing_needs_classes(error_of: ErrorOf) -> None:
    words_ = ["--dataset.train", "{type: tests.data.test_transforms.Tuples, size: 99}", "--loader.collate"]
    assert "Tuples has no `classes`; give their number, classes: 10" in error_of(*words_, "mixup")
    assert "loader.collate.alpha: is 0" in error_of("--loader.collate", "{type: mixup, alpha: 0}")
