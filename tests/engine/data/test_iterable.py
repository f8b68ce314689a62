"""Training data that can only be read in order."""

import os
import random
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.data.loader import LoaderConfig, Step
from common.distributed import Rank
from common.progress import Position
from parts.streams.stream import IterableStream
from tests.conftest import Runs, load, same
from tests.parts.streams.test_streams import SAMPLES, Rereading, Sharing, StatefulStream, stream
from tests.ranks import refused, several, start_ranks
from tests.resume import cut, differing, final, same_after_cut
from custom.datasets.digits_dataset import DigitsDataset


class OnlyItsRank(Rereading):
    """Shares by rank, and says nothing of it."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return islice(super().__iter__(), int(os.environ["RANK"]), None, int(os.environ["WORLD_SIZE"]))


class OrderOfItsOwn(Rereading):
    """Another order in every process that reads."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self.digits.__getitem__, random.Random(os.getpid()).sample(range(SAMPLES), SAMPLES))


class Uneven(Sharing):
    """The first reader has most of the records."""

    def share(self, reader: int, readers: int) -> None:
        first = 70 - readers + 1
        self.own = range(first) if reader == 0 else range(first + reader - 1, SAMPLES, readers - 1)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in self.own[self.at :]:
            self.at += 1
            with Path(os.environ.get("SEEN", os.devnull)).open("a") as file:
                file.write(f"{index}\n")
            yield self.digits[index]
        self.at = 0


class KnowsItsEpoch(StatefulStream):
    """Its order is that of the epoch, which it saves too."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        while self.at < SAMPLES:
            self.at += 1
            yield self.digits[order[self.at - 1]]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 5])
def test_a_state_that_holds_the_epoch(runs: Runs, at: int) -> None:
    """At the end of an epoch, it is that of the epoch before; inside one, that of this one."""
    same_after_cut(runs, "plain", *stream(f"{__name__}.KnowsItsEpoch"), at=at)


class WithLength(torch.utils.data.IterableDataset[Any]):
    """PyTorch's own class, with a length: it has a `__getitem__`, which only raises an error."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.stream = Rereading(data_dir, mode)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.stream)


class Exhausted:
    """Gives what it has once, like a file that was read to its end."""

    def __init__(self, data_dir: Path, mode: str, samples: int) -> None:
        digits = DigitsDataset(data_dir, mode)
        self.records = iter([digits[index] for index in range(samples)])

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.records


def test_a_stream_with_a_length(runs: Runs) -> None:
    folder = runs.train(*stream(f"{__name__}.WithLength", "--progress.epoch", "1"))
    assert load(folder)["position"]["step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["0", "2"])
def test_a_last_step_that_is_not_full_is_left_out(runs: Runs, worker: str) -> None:
    """loader.drop_last: 100 records in steps of 32."""
    uncut = final(runs.train(*stream("Rereading", "--loader.drop_last", "true", "--num_workers", worker), name="uncut"))
    assert uncut["latest"]["position"] == {"step": 6, "epoch": 2, "sample": 0, "epoch_size": 0}
    cut(runs, "plain", 6, *stream("Rereading", "--loader.drop_last", "true", "--num_workers", worker))
    more = ["--loader.drop_last", "true", "--num_workers", worker, "--resume", "auto"]
    assert differing(uncut, final(runs.train(*stream("Rereading", *more), name="cut"))) == []


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), [("2", "0"), ("0", "2")])
def test_a_stream_with_state_and_workers_is_read_again(runs: Runs, saved: str, resumed: str) -> None:
    """Only the main process knows where it stands; the trial batch of two ranks does not move it on."""
    words = stream("StatefulStream", "--model", "{type: tests.small.Plain}", "--batch_size", "16")
    several(runs, 2, runs.words(*words, name="uncut"))
    several(runs, 2, runs.words(*words, "--num_workers", saved, name="cut"), at=8)  # of which two calls are for nothing
    several(runs, 2, runs.words(*words, "--num_workers", resumed, "--resume", "auto", name="cut"))
    assert same(load(runs.root / "uncut")["model"], load(runs.root / "cut")["model"])
    assert "reading 1 steps again" in (runs.root / "cut" / "train.log").read_text()


@pytest.mark.slow
def test_a_stream_without_state_is_read_again(runs: Runs) -> None:
    """It repeats itself here, so the result is the same; the log does not promise that."""
    uncut = final(runs.train(*stream("Rereading"), name="uncut"))
    cut(runs, "plain", 7, *stream("Rereading"))
    folder = runs.train(*stream("Rereading", "--resume", "auto"), name="cut")
    assert differing(uncut, final(folder)) == []
    log = (folder / "train.log").read_text()
    assert "reading 2 steps again" in log
    assert "not guaranteed to be bit-exact or sample-exact" in log


def test_a_schedule_that_needs_the_length_says_so(runs: Runs) -> None:
    """With max_steps given, it works."""
    more = ["--optim.lr_scheduler.type", "cosine"]
    assert runs.fail(*stream("Rereading", *more)) == 2
    assert "max_steps" in (runs.root / "run" / "train.log").read_text()
    runs.train(*stream("Rereading", *more, "--progress.max_steps", "5"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "worker", "steps", "name"),
    [(1, 3, 21, "Sharing"), (2, 0, 10, "Sharing"), (2, 2, 10, "Sharing"), (2, 2, 17, f"{__name__}.Uneven")],
)
def test_a_data_set_that_shares_by_itself(runs: Runs, world: int, worker: int, steps: int, name: str) -> None:
    """Each reader gets a share of its own, and all that it gives is used."""
    seen = runs.root / "seen"
    words = stream(name, "--batch_size", "5", "--num_workers", str(worker), "--progress.epoch", "1")
    words += ["--debug.max_samples", "0"]
    ended = start_ranks(runs.root, world, runs.words(*words), environment={"SEEN": str(seen)})
    assert set(ended.codes) == {0}, "\n".join(ended.texts)
    assert load(runs.root / "run")["position"]["step"] == steps
    read = [int(index) for index in seen.read_text().split()]
    assert sorted(read) == list(range(SAMPLES))  # the batch that DDP tries is the first batch of the epoch


@pytest.mark.slow
def test_a_share_with_state_resumes_exactly(runs: Runs) -> None:
    """Each rank saves the state of its own share; no other number of ranks can read on from there."""
    words = stream("Sharing", "--optim.accumulate", "2", "--model", "{type: tests.small.Plain}", "--batch_size", "8")
    several(runs, 2, runs.words(*words, name="uncut"))
    several(runs, 2, runs.words(*words, name="cut"), at=12)  # of which two calls are for nothing
    states = load(runs.root / "cut")["data"]["states"]
    assert [state["dataset"]["at"] for state in states] == [32, 32]
    alone = stream("Sharing", "--optim.accumulate", "4", "--model", "{type: tests.small.Plain}", "--batch_size", "8")
    assert runs.fail(*alone, "--resume", "auto", name="cut") == 2
    assert "shared by 2 process(es)" in (runs.root / "cut" / "train.log").read_text()
    several(runs, 2, runs.words(*words, "--resume", "auto", name="cut"))
    assert differing(final(runs.root / "uncut"), final(runs.root / "cut")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("at", "states"), [(7, [40, 0]), (12, [8, 8])])
def test_shares_that_end_one_after_the_other(runs: Runs, at: int, states: list[int]) -> None:
    """Ranks with 69 and 31 records, 8 each in a step: none is left out, nor after a cut once the shorter has ended."""
    seen = runs.root / "seen"
    words = stream(
        f"{__name__}.Uneven", "--model", "{type: tests.small.Plain}", "--batch_size", "8", "--num_workers", "0"
    )
    ended = start_ranks(runs.root, 2, runs.words(*words, name="uncut"), environment={"SEEN": str(seen)})
    assert set(ended.codes) == {0}, "\n".join(ended.texts)
    assert load(runs.root / "uncut")["position"]["step"] == 2 * 9
    assert sorted(map(int, seen.read_text().split())) == sorted([*range(SAMPLES)] * 2)
    several(runs, 2, runs.words(*words, name="cut"), at=at + 1)  # of which two calls are for nothing
    found = load(runs.root / "cut")["data"]["states"]
    assert [state["dataset"]["at"] for state in found] == states
    several(runs, 2, runs.words(*words, "--resume", "auto", name="cut"))
    assert differing(final(runs.root / "uncut"), final(runs.root / "cut")) == []


class Numbers:
    """Seven records for the first reader, three for the second one."""

    def share(self, reader: int, readers: int) -> None:
        self.own = range(7) if reader == 0 else range(7, 10)

    def __iter__(self) -> Iterator[int]:
        return iter(self.own)


def settings(*, drop_last: bool = False) -> Any:
    """What a stream needs of a config."""
    return SimpleNamespace(
        batch_size=2,
        num_workers=0,
        loader=LoaderConfig(drop_last=drop_last),
        optim=SimpleNamespace(accumulate=1),
        debug=SimpleNamespace(max_samples=0),
        dist=SimpleNamespace(random_seed=0),
    )


def test_a_position_that_was_restored_is_saved_again() -> None:
    """A run may be saved before its first step: after an evaluation that it owed."""
    resumed = IterableStream(StatefulStream(Path(), "train"), settings(), Rank())
    saved = {"states": [{"dataset": {"at": 4}, "sample": 4, "ended": False}]}
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_step_of_uneven_shares_is_the_mean_over_its_samples(monkeypatch: pytest.MonkeyPatch, drop_last: bool) -> None:
    """Two ranks in two threads. The one that has no records left takes part with its first batch, and weight 0."""
    barrier, values = threading.Barrier(2, timeout=10), [None, None]
    steps: list[list[Step]] = [[], []]
    config = settings(drop_last=drop_last)

    def gather(value: Any, rank: Rank) -> list[Any]:
        values[rank.rank] = value
        barrier.wait()
        found = list(values)
        barrier.wait()
        return found

    def read(number: int) -> None:
        steps[number] = list(IterableStream(Numbers(), config, Rank(rank=number, world_size=2)).epoch(Position()))

    monkeypatch.setattr("parts.streams.stream.gather_objects", gather)
    threads = [threading.Thread(target=read, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batches = [[[batch.tolist() for batch in step.batches] for step in each] for each in steps]
    weights = [[step.global_batch.weights for step in each] for each in steps]
    count = 1 if drop_last else 4
    assert batches[0] == [[[0, 1]], [[2, 3]], [[4, 5]], [[6]]][:count]
    assert batches[1] == [[[7, 8]], [[9]], [[7, 8]], [[7, 8]]][:count]
    assert weights[0] == [[1.0], [4 / 3], [2.0], [2.0]][:count]
    assert weights[1] == [[1.0], [2 / 3], [0.0], [0.0]][:count]
    assert [step.global_batch.samples for step in steps[0]] == [4, 3, 2, 1][:count]
    assert {each[-1].global_batch.after for each in steps} == {Position(step=count, epoch=1)}


def test_workers_that_read_other_records(runs: Runs) -> None:
    """Dealing these out would read some twice, and others never."""
    assert runs.fail(*stream(f"{__name__}.OrderOfItsOwn"), "--num_workers", "2") == 2
    assert "the workers read different records" in (runs.root / "run" / "train.log").read_text()


@pytest.mark.slow
def test_ranks_that_read_other_records(runs: Runs) -> None:
    """Dealing these out would leave out half of them."""
    message = refused(runs, 2, runs.words(*stream(f"{__name__}.OnlyItsRank")))
    assert "the ranks read different records" in message and "share(reader, readers)" in message


@pytest.mark.parametrize(("samples", "epoch"), [(0, 1), (40, 2)])
def test_an_epoch_without_samples(runs: Runs, samples: int, epoch: int) -> None:
    """The loop would turn for ever."""
    assert runs.fail("--dataset.train", f"{{type: engine.data.test_iterable.Exhausted, samples: {samples}}}") == 2
    log = (runs.root / "run" / "train.log").read_text()
    assert f"dataset.train: Exhausted yielded no sample in epoch {epoch}" in log


@pytest.mark.slow
def test_random_transforms_of_a_stream(runs: Runs) -> None:
    """Seeded like all that a dataset draws."""
    transforms = "[{type: tests.parts.transforms.test_transforms.RandomScale, limit: 0.5}]"
    more = stream("Rereading", "--dataset.train.transforms", transforms)
    alone = final(runs.train(*more, name="alone"))
    assert differing(alone, final(runs.train(*more, "--num_workers", "2", name="workers"))) == []
    without = final(runs.train(*stream("Rereading"), name="without"))
    assert not same(alone["latest"]["model"], without["latest"]["model"])
