"""Training data that can only be read in order."""

import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.base.errors import UserError
from tests.conftest import ErrorOf, Runs, load, metrics, same
from tests.ranks import several
from tests.resume import final, same_after_cut, words
from tests.samples import Digits

SAMPLES = 100


class Stream:
    """Digits one after the other, with noise from a global generator; it cannot tell where it stands."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.digits = Digits(data_dir, mode)
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(self.at, SAMPLES):
            self.at = (index + 1) % SAMPLES
            item = self.digits[index]
            yield {**item, "image": item["image"] + 0.01 * random.random() + 0.01 * torch.rand(())}
        self.at = 0


class StatefulStream(Stream):
    """The same, able to say where it stands and to continue there."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Rereading(Stream):
    """Starts from its beginning whenever it is read."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.at = 0
        return super().__iter__()


class AsPyTorchShows(Rereading):
    """Leaves out what other workers of its process read, as the manual of PyTorch has it."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = torch.utils.data.get_worker_info()
        return islice(super().__iter__(), info.id if info else 0, None, info.num_workers if info else 1)


class Sharing(StatefulStream):
    """Reads its share alone, notes which records these are, and draws nothing."""

    def share(self, reader: int, readers: int) -> None:
        self.reader, self.readers = reader, readers

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(self.at + self.reader, SAMPLES, self.readers):
            self.at = index + self.readers - self.reader
            with Path(os.environ.get("SEEN", os.devnull)).open("a") as file:
                file.write(f"{index}\n")
            yield self.digits[index]
        self.at = 0


class HeldOpen(Rereading):
    """Continues where it stands, as a connection or a pipe does: 100 records an epoch; nothing gives one back."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.records = iter(range(len(self.digits)))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self.digits.__getitem__, islice(self.records, SAMPLES))


class GoesOn(StatefulStream):
    """The same, able to say where it stands; what it says is its own object, which changes as it reads."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.place = {"next": 0, "left": 0}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.place["left"] = self.place["left"] or SAMPLES
        while self.place["left"]:
            self.place["left"] -= 1
            self.place["next"] += 1
            yield self.digits[self.place["next"]]

    def state_dict(self) -> dict[str, Any]:
        return self.place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state


class StartsAnew(StatefulStream):
    """Each pass starts at the first record, but the one after `load_state_dict`, which may find nothing left."""

    start = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        start, self.start = self.start, 0
        for index in range(start, SAMPLES):
            self.at = index + 1
            yield self.digits[index]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class ShuffledAtOnce(Rereading):
    """Draws its order from a global generator, before the first record is asked for."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self.digits.__getitem__, random.sample(range(SAMPLES), SAMPLES))


def stream(name: str, *more: str) -> list[str]:
    # 100 samples in batches of 32: steps of 32, 32, 32 and 4.
    path = name if "." in name else f"{__name__}.{name}"
    data = ["--dataset.train", f"{{type: {path}}}", "--progress.epoch_val", "1"]
    return words("plain", *data, *more)


def test_epochs_end_where_the_data_ends(runs: Runs) -> None:
    """Without a length, the epoch ends when the data does, and periods in epochs are asked there."""
    folder = runs.train(*stream("Rereading"))
    assert load(folder)["position"] == {"step": 8, "epoch": 2, "sample": 0, "epoch_size": 0}
    assert [entry["step"] for entry in metrics(folder, "val")] == [4, 8]


@pytest.mark.parametrize("name", ["GoesOn", "Sharing"])
def test_a_short_run_on_a_stream(runs: Runs, name: str) -> None:
    """debug.max_samples: 40 of 100 records, also after a resume inside the epoch, by any number of readers."""
    words = stream(name, "--debug.max_samples", "40", "--batch_size", "8")
    uncut, _ = same_after_cut(runs, "plain", *words, at=(3, 6))
    assert load(uncut)["position"]["step"] == 2 * 5
    shared = final(runs.train(*words, "--num_workers", "2", "--progress.epoch", "1", name="shared"))
    assert shared["latest"]["position"]["step"] == (5 if name == "GoesOn" else 6)  # shares of 20: 8 + 8 + 4


@pytest.mark.parametrize(
    ("name", "at"),
    [
        *((name, 5) for name in ("StatefulStream", "GoesOn", "StartsAnew")),
        *(pytest.param("StatefulStream", at, marks=pytest.mark.slow) for at in (2, 3, 4, 7)),
        *(pytest.param(name, at, marks=pytest.mark.slow) for name in ("GoesOn", "StartsAnew") for at in (3, 7)),
    ],
)
def test_a_stream_with_state_resumes_exactly(runs: Runs, name: str, at: int) -> None:
    """Its own state is saved, of the last step and not of what was looked at beyond; also between epochs (5)."""
    same_after_cut(runs, "plain", *stream(name), at=at)


def test_an_iterable_cannot_be_evaluated_on(runs: Runs) -> None:
    with pytest.raises(UserError, match="needs __len__ and __getitem__"):
        runs.train("--dataset.val", "{type: tests.parts.streams.test_streams.Stream}")


@pytest.mark.parametrize("name", ["Rereading", "AsPyTorchShows", "ShuffledAtOnce"])
def test_workers_read_each_record_once(runs: Runs, name: str) -> None:
    """The batches of one reader, to the last bit: what a worker keeps, the others leave out."""
    alone = final(runs.train(*stream(name), name="alone"))
    shared = final(runs.train(*stream(name, "--num_workers", "3"), name="shared"))
    assert same(alone["latest"]["model"], shared["latest"]["model"])
    assert alone["latest"]["position"] == shared["latest"]["position"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "worker", "size", "name"),
    [
        (2, 0, 16, "Rereading"),
        (2, 2, 16, "AsPyTorchShows"),
        (3, 0, 3, "Rereading"),
        *((2, 0, 16, name) for name in ("StatefulStream", "Stream", "HeldOpen", "GoesOn", "ShuffledAtOnce")),
    ],
)
def test_ranks_read_each_record_once(runs: Runs, world: int, worker: int, size: int, name: str) -> None:
    """As one process computes it, also the last records of an epoch, of which two of three ranks have none."""
    same_for_both = ["--model", "{type: tests.small.Plain}", "--precision.mode", "fp64", "--optim.accumulate", "2"]
    alone = runs.train(*stream(name, *same_for_both, "--batch_size", str(world * size)), name="alone")
    more = [*same_for_both, "--batch_size", str(size), "--num_workers", str(worker)]
    several(runs, world, runs.words(*stream(name, *more), name="shared"))
    first, second = load(alone), load(runs.root / "shared")
    assert first["position"] == second["position"]
    for key, value in first["model"].items():
        torch.testing.assert_close(second["model"][key], value, rtol=0, atol=1e-12)


class OwnGenerator(Rereading):
    """Draws from a generator of its own, without a seed."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.rng = np.random.default_rng()

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for item in super().__iter__():
            yield {**item, "image": item["image"] + float(self.rng.random())}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_generator_of_its_own_is_seeded(runs: Runs, workers: str) -> None:
    """So that a resume reads the same records."""
    part = "{$REPLACE: true, type: tests.parts.streams.test_streams.OwnGenerator}"
    same_after_cut(runs, "plain", "--dataset.train", part, "--num_workers", workers, promised=False)


class Unfit(Stream):
    """Every second record lacks an entry."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number, item in enumerate(super().__iter__()):
            yield {"image": item["image"]} if number % 2 else item


def test_records_that_make_no_batch(error_of: ErrorOf) -> None:
    text = error_of("--dataset.train", "{$REPLACE: true, type: tests.parts.streams.test_streams.Unfit}")
    assert "no batch can be made of records of Unfit: KeyError: 'label'" in text
