"""Data sets that change from epoch to epoch."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from common.data.keyed import KeyedBatches
from tests.conftest import Runs, load, same
from tests.ranks import several
from tests.resume import final, same_after_cut, words
from custom.datasets.digits_dataset import DigitsDataset

HERE = "engine.data.test_set_epoch"


class Brighter(DigitsDataset):
    """Images that become brighter with each epoch of the training; without an epoch, none can be read."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.mode = mode

    def set_epoch(self, epoch: int) -> None:
        assert self.mode == "train" or epoch == 0
        self.factor = 1 + 0.5 * epoch

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        return {**item, "image": item["image"] * self.factor}


class BrighterStream:
    """The same, read in an order that changes with the epoch too."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.digits = Brighter(data_dir, mode)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.at = epoch, 0
        self.digits.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(160, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for index in order[self.at :]:
            self.at += 1
            yield self.digits[index]


class BrighterWithState(BrighterStream):
    """Reading on from a state is not undone by `set_epoch`, which starts an epoch."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def changing(name: str, *more: str) -> list[str]:
    data = ["--dataset.train", f"{{type: {HERE}.{name}}}", "--dataset.val", f"{{type: {HERE}.Brighter}}"]
    return words("plain", *data, "--progress.epoch", "3", *more)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Brighter", "BrighterStream"])
def test_workers_know_the_epoch(runs: Runs, name: str) -> None:
    """Workers that live on from epoch to epoch, too; only the training has epochs."""
    alone = final(runs.train(*changing(name), name="alone"))
    shared = final(runs.train(*changing(name, "--num_workers", "2"), name="shared"))
    assert same(alone["latest"]["model"], shared["latest"]["model"])
    assert alone["measured"] == shared["measured"]
    plain = final(runs.train(*words("plain", "--progress.epoch", "3"), name="plain"))
    assert not same(alone["latest"]["model"], plain["latest"]["model"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "worker"), [("Brighter", 0), ("Brighter", 2), ("BrighterWithState", 0)])
def test_a_resume_inside_a_later_epoch(runs: Runs, name: str, worker: int) -> None:
    more = ["--num_workers", str(worker)]
    same_after_cut(runs, "plain", *changing(name, *more))


class Counting(Brighter):
    """Images that become brighter with each sample that was read in the epoch."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(0)
        self.count = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.count += 1
        self.factor = 1 + 0.01 * self.count
        return super().__getitem__(index)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.slow
@pytest.mark.parametrize("at", [8, 10])
def test_what_an_epoch_begins_with_is_not_what_a_resume_restores(runs: Runs, at: int) -> None:
    """Inside an epoch, and at the end of one."""
    same_after_cut(runs, "plain", *changing("Counting"), at=at)


@pytest.mark.slow
def test_the_epoch_goes_through_data_sets_around_others(runs: Runs) -> None:
    """Transforms, several sets in one, and the first samples of both; with an order that needs the classes."""
    one = f"{{type: {HERE}.Brighter}}"
    data = f"{{type: Concat, sets: [{one}, {one}], transforms: [{{type: Normalize, mean: [0.5], std: [0.5]}}]}}"
    more = words("plain", "--dataset.train", data, "--loader.order", "{type: balanced, samples: 100}")
    alone = final(runs.train(*more, name="alone"))
    assert alone["latest"]["position"]["step"] == 2 * 4
    shared = final(runs.train(*more, "--num_workers", "2", name="shared"))
    assert same(alone["latest"]["model"], shared["latest"]["model"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Brighter", "BrighterStream", "BrighterWithState"])
def test_ranks_know_the_epoch(runs: Runs, name: str) -> None:
    same_for_both = ["--model", "{type: tests.small.Plain}", "--precision.mode", "fp64"]
    alone = load(runs.train(*changing(name, *same_for_both), name="alone"))
    several(runs, 2, runs.words(*changing(name, *same_for_both, "--batch_size", "16"), name="shared"))
    shared = load(runs.root / "shared")
    for key, value in alone["model"].items():
        torch.testing.assert_close(shared["model"][key], value, rtol=0, atol=1e-12)


class Grouped:
    """Samples and batches draw nothing; the groups of an epoch do."""

    random = False

    def __len__(self) -> int:
        return 9

    def set_epoch(self, epoch: int) -> None:
        self.groups = torch.randperm(len(self)).tolist()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"group": torch.tensor(self.groups[index])}


def test_an_epoch_that_draws_is_the_same_in_each_process() -> None:
    """Whatever the process has drawn before, which is not changed either."""
    batches = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        batches.append(KeyedBatches(Grouped(), default_collate, 5).__getitems__((0, [0, 1, 2]))["group"])
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*batches)
