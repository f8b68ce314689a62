"""Datasets that are made of other datasets, as the config nests them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.base.errors import UserError
from common.data.keyed import find_collate
import train
from library.data.mix_collate import Mixup
from tests.conftest import ErrorOf
from tests.data.test_combined import build, numbers
from tests.samples import Digits

DIGITS = {"type": "DigitsDataset"}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "Concat", "sets": []}, "dataset.train.sets: is empty"),
        ({"type": "Repeat", "set": DIGITS, "times": 0}, "dataset.train.times: is 0"),
        ({"type": "Subset", "set": DIGITS, "fraction": [0.5, 0.2]}, "[from, to] within 0..1"),
        ({"type": "Concat", "sets": [DIGITS, numbers(0)]}, "sets[1]: even, odd"),
        (
            {"type": "Repeat", "times": 2, "set": {"type": "tests.parts.streams.test_streams.Stream"}},
            "set is a tests.parts.streams.test_streams.Stream, which can only be read in order",
        ),
    ],
)
def test_what_cannot_be_combined(section: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        build(section)
    assert words in str(error.value)


class WithMethod:
    """Its targets are a method; those of `numbers` an attribute."""

    def __init__(self, data_dir: Path, mode: str) -> None: ...

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index

    def targets(self) -> list[int]:
        return [7, 8]


@pytest.mark.parametrize("first", [True, False])
def test_targets_by_attribute_and_by_method(first: bool) -> None:
    sets = [numbers(0), {"type": f"{__name__}.WithMethod"}]
    data: Any = build({"type": "Concat", "sets": sets if first else sets[::-1]})
    found = [int(target) for target in data.targets()]
    assert found[-2:] == [7, 8] if first else found[:2] == [7, 8]


def test_mistakes_in_nested_sections_name_their_place(error_of: ErrorOf, tmp_path: Path) -> None:
    """All at once, with the file and line, as those of any section."""
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"$BASE: {train.__file__.removesuffix('train.py')}tests/base.yaml\n"
        "dataset:\n  train:\n    type: Concat\n    sets:\n"
        "      - {type: DigitsDataset, shift: 1}\n"
        "      - {type: DigitsDataset, shfit: 1}\n"
        "      - type: Repeat\n        times: two\n        set: {type: DigitDataset, transforms: [{type: ToFlot}]}\n"
    )
    text = error_of("--config", str(config))
    assert "4 problems" in text
    assert "dataset.train.sets[1].shfit = 1" in text and "mine.yaml:7" in text and "did you mean shift?" in text
    assert "dataset.train.sets[2].times = 'two'" in text and "mine.yaml:9" in text
    assert "dataset.train.sets[2].set.type = 'DigitDataset'" in text and "did you mean DigitsDataset?" in text
    assert "dataset.train.sets[2].set.transforms[0].type = 'ToFlot'" in text and "did you mean ToFloat?" in text


class Named(Digits):
    """Has a collate function of its own, and names."""

    names = ("a", "b")

    def collate(self, items: list[Any]) -> Any:
        return len(items)


def test_what_only_the_first_set_has() -> None:
    section = {"type": "Concat", "sets": [{"type": f"{__name__}.Named"}, {"type": "tests.samples.Digits"}]}
    dataset = build(section)
    assert dataset.names == ("a", "b") and find_collate(dataset, None)([1, 2]) == 2


@pytest.mark.parametrize("label", [-100, 10])
def test_labels_that_cannot_be_mixed(label: int) -> None:
    data = Digits(Path(train.__file__).parent / "data", "train")
    items = [{**data[index], "label": torch.tensor(label if index == 2 else 3)} for index in range(4)]
    with pytest.raises(UserError, match=rf"from 0 to 9 to be mixed, not \[3, 3, {label}, 3\]"):
        Mixup(data)(items)
