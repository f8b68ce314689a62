"""Training data that can only be read in order."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from tests.conftest import Runs, load, metrics
from tests.test_resume import cut, differing, final, words
from custom.datasets.digits_dataset import DigitsDataset

SAMPLES = 100


class Stream:
    """Digits one after the other, with noise from a global generator; it cannot tell where it stands."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.digits = DigitsDataset(data_dir, mode)
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(self.at, SAMPLES):
            self.at = (index + 1) % SAMPLES
            item = self.digits[index]
            yield {**item, "image": item["image"] + 0.01 * random.random() + 0.01 * torch.rand(())}
        self.at = 0


class StatefulStream(Stream):
    """The same, able to say where it stands and to go on there."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Rereading(Stream):
    """Starts from its beginning whenever it is read."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.at = 0
        return super().__iter__()


def stream(name: str, *more: str) -> list[str]:
    # 100 samples in batches of 32: steps of 32, 32, 32 and 4.
    data = ["--dataset.train", f"{{type: tests.test_iterable.{name}}}", "--progress.epoch_val", "1"]
    return words("plain", *data, *more)


def test_epochs_end_where_the_data_ends(runs: Runs) -> None:
    """R-63: without a length, the epoch ends when the data does, and periods in epochs are asked there."""
    folder = runs.train(*stream("Rereading"))
    assert load(folder)["position"] == {"step": 8, "epoch": 2, "sample": 0, "epoch_size": 0}
    assert [entry["step"] for entry in metrics(folder, "val")] == [4, 8]


@pytest.mark.parametrize("at", [2, 3, 4, 5, 7])
def test_a_stream_with_state_resumes_exactly(runs: Runs, at: int) -> None:
    """Its own state is saved, of the last step and not of what was looked at beyond."""
    uncut = final(runs.train(*stream("StatefulStream"), name="uncut"))
    cut(runs, "plain", at, *stream("StatefulStream"))
    folder = runs.train(*stream("StatefulStream", "--resume", "auto"), name="cut")
    assert differing(uncut, final(folder)) == []
    assert "this resume is bit-exact" in (folder / "train.log").read_text()


def test_a_stream_without_state_is_read_again(runs: Runs) -> None:
    """It repeats itself here, so the result is the same; the log does not promise that."""
    uncut = final(runs.train(*stream("Rereading"), name="uncut"))
    cut(runs, "plain", 7, *stream("Rereading"))
    folder = runs.train(*stream("Rereading", "--resume", "auto"), name="cut")
    assert differing(uncut, final(folder)) == []
    log = (folder / "train.log").read_text()
    assert "reading 2 batches again" in log
    assert "neither bit-exact nor sample-exact" in log


def test_an_iterable_cannot_be_evaluated_on(runs: Runs) -> None:
    with pytest.raises(UserError, match="needs __len__ and __getitem__"):
        runs.train("--dataset.val", "{type: tests.test_iterable.Stream}")


def test_a_schedule_that_needs_the_length_says_so(runs: Runs) -> None:
    """R-63: with max_steps given, it works."""
    more = ["--optim.lr_scheduler.type", "cosine"]
    assert runs.fail(*stream("Rereading", *more)) == 2
    assert "max_steps" in (runs.root / "run" / "train.log").read_text()
    runs.train(*stream("Rereading", *more, "--progress.max_steps", "5"))
