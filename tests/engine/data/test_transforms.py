"""`transforms` in a dataset's section, and batches of mixed images."""

from typing import Any

import pytest

from common.base.errors import UserError
from common.data.keyed import KeyedBatches, find_collate
from common.data.sections import build_dataset
from tests.conftest import ErrorOf
from tests.parts.transforms.test_transforms import DATA, build


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        ({"type": "ToFloat"}, "ToFloat: got a Tensor"),
        ({"type": "ToFloat", "key": "picture"}, "transforms[0] (ToFloat): a sample has no 'picture'"),
        ({"type": "Named", "names": ["a"], "key": None}, "Named: a sample has 2 parts"),
        ({"type": "Normalize", "mean": [0, 0], "std": [1, 1]}, "Normalize: the image has 1 channels, but mean has 2"),
        ({"type": "Normalize", "mean": [0], "std": [1], "key": "x"}, "transforms[0] (Normalize): a sample has no 'x'"),
        ({"type": "Normalize", "mean": [0], "std": [0]}, "std more than 0"),
    ],
)
def test_a_transform_that_does_not_fit(transform: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        build("DigitsDataset", transform)[0]
    assert words in str(error.value)


def test_an_error_in_a_transform_names_it_and_the_sample() -> None:
    negative_ = {"type": "tests.parts.transforms.test_transforms.negative", "brightest": 1, "key": None}
    data = build_dataset({"type": "DigitsDataset", "transforms": [negative_]}, "train", DATA, limit=9)
    where = r"sample 7 of DigitsDataset cannot be read: .*transforms\[0\] \(tests.*negative\): TypeError"
    with pytest.raises(RuntimeError, match=where):
        KeyedBatches(data, find_collate(data, None), seed=0).__getitems__((0, [7]))


def test_mistakes_in_the_config_are_reported_together(error_of: ErrorOf) -> None:
    text = error_of(
        "--dataset.train.transforms", "[{type: Normalise, mean: [0]}, {type: Normalize, mean: 0, std: [1]}]",
        "--dataset.val.transforms", "Normalize", "--loader.collate", "{type: mixup, alhpa: 1}",
    )  # fmt: skip
    assert "4 problems" in text
    assert "dataset.train.transforms[0].type = 'Normalise'" in text and "did you mean Normalize?" in text
    assert "dataset.train.transforms[1].mean = 0" in text and "must be a list" in text
    assert "dataset.val.transforms = 'Normalize'" in text and "must be a list of sections" in text
    assert "loader.collate.alhpa = 1" in text and "did you mean alpha?" in text


def test_mixing_needs_classes(error_of: ErrorOf) -> None:
    words_ = ["--dataset.train", "{type: tests.parts.transforms.test_transforms.Tuples, size: 99}", "--loader.collate"]
    assert "Tuples has no `classes`; give their number, classes: 10" in error_of(*words_, "mixup")
    assert "loader.collate.alpha: is 0" in error_of("--loader.collate", "{type: mixup, alpha: 0}")
