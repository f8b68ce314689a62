"""Samples are read before training, twice: what a resume says of the data was looked at."""

import csv
import os
import random
import re
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parts.data_check.reading import SAMPLES, chosen
from tests.conftest import ErrorOf, Runs, load, same
from tests.parts.data_check.test_data_check import Noisy as Unseeded

HERE = "engine.data.test_reading"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that run tests are busy."""
    monkeypatch.setattr("parts.data_check.reading._SECONDS", 60.0)
    monkeypatch.setattr("parts.data_check.reading._LONGEST", 90.0)


VARIES = r"WARNING .* reading sample \d+ of dataset\.train twice gives two values of `image`: "


def data(kind: str, **arguments: Any) -> list[str]:
    """Words of a command line: train and validate on a dataset of this file."""
    section = ", ".join(f"{name}: {value}" for name, value in {"type": f"{HERE}.{kind}", **arguments}.items())
    words = ["--dataset.train", f"{{$REPLACE: true, {section}}}", "--dataset.val", f"{{$REPLACE: true, {section}}}"]
    return [*words, "--dataset.eval", "null", "--batch_size", "16"]


def log_of(folder: Path) -> str:
    return (folder / "train.log").read_text()


def guarantee(folder: Path) -> str:
    """Return what the log said of the last resume."""
    return re.findall(r"this resume .*", log_of(folder))[-1]


def cut_and_uncut(runs: Runs, *words: str) -> tuple[Path, Path]:
    """Train for two epochs at once, and with a stop between them."""
    uncut = runs.train(*words, name="uncut")
    runs.train(*words, "--progress.epoch", "1", name="cut")
    return uncut, runs.train(*words, "--resume", "auto", name="cut")


class Noisy:
    """Pictures with noise; `draw` makes it, from a generator that the dataset holds in one of many ways."""

    def __init__(self, data_dir: Path, mode: str, held: str = "numpy") -> None:
        self.x = torch.zeros(48, 1, 8, 8)
        self.held = held
        self.numpy = np.random.default_rng(0) if held == "numpy" else None
        self.legacy = np.random.RandomState(0) if held == "legacy" else None
        self.python = [random.Random(0)] if held == "python" else []
        self.torch = {"generator": torch.Generator().manual_seed(0)} if held == "torch" else {}
        self.closure = self._closure() if held == "closure" else None
        self.transforms = [Jitter(), Jitter()] if held == "transforms" else []
        self.lazy: Any = None

    def _closure(self) -> Callable[[], float]:
        generator = np.random.default_rng(0)
        return lambda: float(generator.normal())

    def __len__(self) -> int:
        return len(self.x)

    def noise(self) -> float:
        if self.numpy is not None:
            return float(self.numpy.normal())
        if self.legacy is not None:
            return float(self.legacy.randn())
        if self.python:
            return self.python[0].gauss(0, 1)
        if self.torch:
            return float(torch.randn((), generator=self.torch["generator"]))
        if self.closure is not None:
            return self.closure()
        if self.held == "module":
            return float(_GENERATOR.normal())
        if self.held == "lazy":
            if self.lazy is None:
                self.lazy = np.random.default_rng(0)
            return float(self.lazy.normal())
        return sum(transform() for transform in self.transforms)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.x[index] + self.noise(), "label": index % 10}


_GENERATOR = np.random.default_rng(0)


class Jitter:
    """As MONAI's transforms: a generator in the class, and one of its own once it is seeded."""

    R = np.random.RandomState(1)

    def __call__(self) -> float:
        return float(self.R.uniform())


HELD = ["numpy", "legacy", "python", "torch", "closure", "module", "lazy", "transforms"]


@pytest.mark.slow
@pytest.mark.parametrize(("held", "worker"), [*((held, 0) for held in HELD), ("numpy", 2), ("transforms", 2)])
def test_generators_of_ones_own_are_seeded_for_each_sample(runs: Runs, held: str, worker: int) -> None:
    uncut, cut = cut_and_uncut(runs, *data("Noisy", held=held), "--num_workers", str(worker))
    assert same(load(uncut)["model"], load(cut)["model"])
    assert guarantee(cut).startswith("this resume is bit-exact as far as compared: ")
    assert "96 of 96 samples read again: the same" in guarantee(cut)
    assert "twice" not in log_of(cut)


class Changing(Noisy):
    """Samples that nobody can read twice, each kind for another reason."""

    def __init__(self, data_dir: Path, mode: str, how: str) -> None:
        super().__init__(data_dir, mode, held="")
        self.how, self.count = how, 0
        self.cache: dict[int, Tensor] = {}
        self.x += torch.arange(1, 49).view(48, 1, 1, 1) / 100
        self.system = random.SystemRandom()

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self.x[index]
        if self.how == "counter":
            self.count += 1
            image = image * 0.9**self.count
        elif self.how == "cache":
            if index not in self.cache:
                self.cache[index] = image + torch.rand(())
            image = self.cache[index]
        elif self.how == "in place":
            image *= 0.9
        elif self.how == "system":
            image = image + self.system.random()
        elif self.how == "unseeded":
            image = image + float(np.random.default_rng().normal())
        return {"image": image.clone(), "label": index % 10}


@pytest.mark.parametrize("how", ["counter", "cache", "in place", "system", "unseeded"])
def test_what_cannot_be_read_twice_is_never_called_bit_exact(runs: Runs, how: str) -> None:
    words = data("Changing", how=how)
    folder = runs.train(*words, "--progress.epoch", "1")
    assert re.search(VARIES, log_of(folder))
    if how == "system":
        assert re.search("generators found: Changing.system", log_of(folder))
    runs.train(*words, "--resume", "auto")
    assert re.match(r"this resume is sample-exact, not bit-exact \(dataset\.train: reading twice ", guarantee(folder))
    assert how == "cache" or "read again: the same" not in guarantee(folder)  # evaluation has one epoch alone


class WithState(Changing):
    """Counts, and saves its count: it is exact by its own means, and its generator stays its own."""

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Forgetful(WithState):
    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.slow
def test_a_dataset_with_a_state_is_put_back_before_it_is_read_again(runs: Runs) -> None:
    train = [*data("WithState", how="counter")[:2], "--batch_size", "16"]
    uncut, cut = cut_and_uncut(runs, *train)
    assert same(load(uncut)["model"], load(cut)["model"])
    assert "twice" not in log_of(cut)
    assert re.search(VARIES, log_of(runs.train(*data("Forgetful", how="counter")[:2], name="forgetful")))


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["2step", "1epoch"])
def test_a_fixed_reduction_reads_nothing_of_it(runs: Runs, cut: str) -> None:
    """The batch that it tries before training is not counted, in a first start and in a resume."""
    words = [*data("WithState", how="counter")[:2], "--dist.reduction", "fixed"]
    uncut = runs.train(*words, "--progress.epoch", "2", name="uncut")
    end = "--progress.max_steps" if cut == "2step" else "--progress.epoch"
    runs.train(*words, end, cut[0])
    more = [] if end == "--progress.epoch" else ["--progress.max_steps", "null"]
    folder = runs.train(*words, "--progress.epoch", "2", *more, "--resume", "auto")
    assert same(load(uncut)["model"], load(folder)["model"])
    assert load(uncut)["data"]["dataset"] == load(folder)["data"]["dataset"]


@dataclass
class Entry:
    path: Path
    label: int


class Pictures:
    """Pictures in files whose names no attribute holds; `how` says what else it holds, to be mistaken for the data."""

    random = False

    def __init__(self, data_dir: Path, mode: str, how: str) -> None:
        self.root = data_dir / "pictures"
        table = self.root / "labels.csv"
        rows = list(csv.DictReader(table.open()))
        self.ids = [row["id"] for row in rows]
        self.labels = [int(row["label"]) for row in rows]
        if how == "table":
            self.table = table
        elif how == "boxes":
            self.boxes = torch.zeros(len(rows), 4)
        else:
            self.samples = [Entry(self.root / f"{name}.npy", 0) for name in self.ids]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = np.load(self.root / f"{self.ids[index]}.npy")
        return {"image": torch.from_numpy(image), "label": self.labels[index]}


def write_pictures(root: Path, change: Callable[[Any], Any] = lambda image: image) -> None:
    root.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    for number in range(80):
        np.save(root / f"{number:05}.npy", change(generator.random((1, 8, 8), dtype=np.float32)))
    lines = [f"{number:05},{number % 10}" for number in range(80)]
    (root / "labels.csv").write_text("\n".join(["id,label", *lines]))


@pytest.mark.parametrize("how", ["table", "boxes", "samples"])
def test_replaced_images_are_noticed_whatever_the_dataset_holds(runs: Runs, how: str) -> None:
    write_pictures(runs.root / "pictures")
    words = [*data("Pictures", how=how), "--dir.data_dir", str(runs.root)]
    folder = runs.train(*words, "--progress.epoch", "1")
    write_pictures(runs.root / "pictures", lambda image: 1 - image)
    runs.train(*words, "--resume", "auto")
    said = guarantee(folder)
    assert re.match(
        r"this resume is not guaranteed to be bit-exact or sample-exact: sample \d+ of dataset\.train: `image` differs "
        r"\(64 of 64 samples read again differ\)",
        said,
    )
    assert "data (" not in said


class OpenFile:
    """Opens its file, or a connection, at once, and keeps it."""

    def __init__(self, data_dir: Path, mode: str, how: str = "file") -> None:
        path = data_dir / "records.bin"
        path.write_bytes(bytes(64 * 64))
        self.held: Any = {"nested": [path.open("rb")]} if how == "file" else sqlite3.connect(":memory:")
        self.file = self.held["nested"][0] if how == "file" else path.open("rb")
        if how != "file":
            self.file.close()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": torch.zeros(1, 8, 8), "label": index % 10}


@pytest.mark.parametrize(("how", "name"), [("file", "OpenFile.file (BufferedReader)"), ("db", "OpenFile.held (Conn")])
def test_an_open_file_is_not_shared_by_workers(runs: Runs, error_of: ErrorOf, how: str, name: str) -> None:
    words = [*data("OpenFile", how=how), "--dir.data_dir", str(runs.root)]
    said = error_of(*words, "--num_workers", "2")
    assert name in said and "Open it on first use, in __getitem__" in said
    folder = runs.train(*words, "--progress.epoch", "1", name="alone")
    runs.train(*words, "--resume", "auto", name="alone")
    assert f"not compared: dataset.train: {name}" in guarantee(folder)


class Counting(Noisy):
    """Leaves a line in a file for each sample that is read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        with open(os.environ["READ_LOG"], "a") as file:
            file.write(f"{os.getpid()} {index}\n")
        return super().__getitem__(index)


def test_a_start_reads_few_samples(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a dataset are 64 at most, spread over it, by processes that do nothing else."""
    assert all(len(set(chosen(size))) == min(SAMPLES, size) for size in (1, 5, 64, 65, 100, 10**9))
    monkeypatch.setenv("READ_LOG", str(runs.root / "read.txt"))
    runs.train(*data("Counting"), "--progress.max_steps", "1", "--debug.max_samples", "0")
    lines = [line.split() for line in (runs.root / "read.txt").read_text().splitlines()]
    others = [number for pid, number in lines if pid != str(os.getpid())]
    assert set(others) <= {str(number) for number in chosen(48)}


def test_a_slow_dataset_is_not_waited_for(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not read in time is not compared, and said so."""
    monkeypatch.setattr("parts.data_check.reading._LONGEST", 0.0)
    folder = runs.train(*data("Noisy"), "--progress.epoch", "1")
    runs.train(*data("Noisy"), "--resume", "auto")
    assert "not compared: dataset.train: its samples could not be read before training (no answer" in guarantee(folder)


def test_a_variable_of_onednn_is_compared(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.train("--progress.epoch", "1")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    monkeypatch.setenv("ONEDNN_VERBOSE", "0")
    said = guarantee(runs.train("--resume", "auto"))
    assert "not bit-exact (environment.ONEDNN_MAX_CPU_ISA None -> SSE41)" in said and "VERBOSE" not in said


class SlowAndNoisy(Unseeded):
    """The two processes have time for a few samples only."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(0.03)
        return super().__getitem__(index)


def test_few_samples_in_the_time_are_compared_too(runs: Runs) -> None:
    words = ["--debug.max_samples", "8", "--progress.max_steps", "1", "--batch_size", "4"]
    folder = runs.train("--dataset.train", f"{{type: {__name__}.SlowAndNoisy}}", *words)
    said = (folder / "train.log").read_text()
    assert "of dataset.train twice gives two values of `image`" in said
