"""Datasets that are made of other datasets, as the config nests them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.data.sections import build_dataset
import train
from tests.checkpoint.test_state import its_state_is_restored
from tests.conftest import Runs, load, metrics, same

DATA = Path(train.__file__).parent / "data"


def build(section: dict[str, Any], mode: str = "train") -> Any:
    return build_dataset(section, mode, DATA)


class Labelled:
    """Numbers, with all that a dataset may have besides its items."""

    classes = ("even", "odd")
    random = False

    def __init__(self, start: int, size: int = 4) -> None:
        self.targets = torch.arange(start, start + size)
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return int(self.targets[index]), self.epoch

    def sample_ids(self) -> list[str]:
        return [f"number {target}" for target in self.targets]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def labels(self) -> list[int]:
        return self.targets.tolist()

    def collate(self, items: list[Any]) -> Any:
        return items

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


def numbers(start: int, **more: Any) -> dict[str, Any]:
    return {"type": "tests.data.test_combined.Labelled", "start": start, **more}


TWO = {"type": "Concat", "sets": [numbers(10, size=1), numbers(20, size=1)]}
NESTED: dict[str, Any] = {
    "type": "Concat",
    "sets": [
        {"type": "Repeat", "times": 2, "set": numbers(0)},
        {
            "type": "Subset",
            "fraction": [0, 1],
            "set": TWO,
        },
    ],
}
ORDER = [0, 1, 2, 3, 0, 1, 2, 3, 10, 20]


def test_all_that_belongs_to_a_sample_goes_with_it() -> None:
    data = build(NESTED)
    assert [data[index][0] for index in range(len(data))] == ORDER
    assert data[-1][0] == 20
    with pytest.raises(IndexError):
        data[len(data)]
    assert data.sample_ids() == [f"number {number}" for number in ORDER]
    assert [int(target) for target in data.targets] == ORDER == [int(label) for label in data.labels()]
    assert data.classes == ("even", "odd") and data.random is False
    assert data.collate([1]) == [1]
    data.set_epoch(3)
    assert {data[index][1] for index in range(len(data))} == {3}
    state = data.state_dict()
    data.set_epoch(4)
    data.load_state_dict(state)
    assert data[9][1] == 3
    assert not hasattr(data, "share")


def test_random_shares_are_disjoint_and_complete() -> None:
    """Ranges of one random order: of another seed, another order, and of every process the same."""

    def share(fraction: Any, seed: int = 0) -> list[int]:
        data = build({"type": "Subset", "set": numbers(0, size=101), "fraction": fraction, "seed": seed})
        return [data[index][0] for index in range(len(data))]

    train_part, val_part = share([0, 0.8]), share([0.8, 1])
    assert sorted(train_part + val_part) == list(range(101)) and len(val_part) == 20
    assert train_part == sorted(train_part) == share([0, 0.8])
    assert share([0, 0.8], seed=1) != train_part


def test_a_run_on_parts_is_a_run_on_the_whole(runs: Runs) -> None:
    """Through the user's door: the digits train to the same weights."""
    digits = "{type: tests.samples.Digits, shift: 1}"
    whole = runs.train("--dataset.train", digits, name="whole")
    section = f"{{type: Concat, sets: [{{type: Subset, fraction: [0, 1], set: {digits}}}]}}"
    parts = runs.train("--dataset.train", section, "--num_workers", "1", name="parts")
    assert same(load(whole)["model"], load(parts)["model"])
    assert metrics(whole, "val")[-1]["values"] == metrics(parts, "val")[-1]["values"]
    assert "train data Concat" in (parts / "train.log").read_text()


SETS = "[{type: tests.samples.Digits}, {type: tests.checkpoint.test_state.Counting}]"
CONCAT = f"{{$REPLACE: true, type: Concat, sets: {SETS}}}"
REPEAT = "{$REPLACE: true, type: Repeat, times: 2, set: {type: tests.checkpoint.test_state.Counting}}"


@pytest.mark.parametrize("section", [CONCAT, REPEAT], ids=["Concat", "Repeat"])
def test_a_state_inside_of_others(runs: Runs, section: str) -> None:
    """Restored with the run."""
    its_state_is_restored(runs, section)
