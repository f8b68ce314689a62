"""The order of an epoch's samples, by `loader.order`."""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.base.errors import UserError
from common.data.keyed import KeyedBatches
from common.data.order import EpochOrder
from common.data.plan import EpochPlan
from common.data.view import View
from common.distributed.seed import mix
from common.progress import Position
from tests.conftest import ENVIRONMENT, PROJECT, Runs, copy_of_project, load, run, same
from tests.data.test_data import Noisy, seen, stream_of
from tests.ranks import refused, several
from tests.resume import final, same_after_cut, words
from custom.datasets.digits_dataset import DigitsDataset

HERE = "tests.data.test_order"


class Labelled(Noisy):
    """Class 0 has nine samples, 1 two, 2 one."""

    targets = (0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 0)

    def __init__(self) -> None:
        super().__init__(12)

    def weights(self) -> list[float]:
        return [0.0, *[1.0] * 9, 3.0, 0.0]


class WeightedDigits(DigitsDataset):
    """Digits of which the ones above 4 are drawn three times as often."""

    @property
    def weights(self) -> Tensor:
        return 1.0 + 2.0 * (self.labels > 4)


def pk(size: int, seed: int, epoch: int, dataset: Any, classes: int = 4, samples: int = 4) -> np.ndarray:
    """Batches of `samples` samples each of `classes` classes, for metric learning."""
    generator = np.random.default_rng((seed, epoch))
    labels = np.asarray(dataset.labels)[:size]
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    batches = []
    for _ in range(size // (classes * samples)):
        for label in generator.choice(len(members), classes, replace=False):
            batches.append(generator.choice(members[label], samples, replace=len(members[label]) < samples))
    return np.concatenate(batches)


def unseeded(size: int, seed: int, epoch: int, dataset: Any) -> np.ndarray:
    return np.random.permutation(size)


class Curriculum(WeightedDigits):
    """Draws other samples in each epoch: the easy ones first."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def weights(self) -> Tensor:
        return (self.labels <= 3 * (self.epoch + 1)).float()


def of_this_process(size: int, seed: int, epoch: int, dataset: Any) -> np.ndarray:
    return np.random.default_rng(os.getpid()).permutation(size)


def repeated(size: int, seed: int, epoch: int, dataset: Any) -> np.ndarray:
    return np.array([0, 3, 0, 0, 3], np.uint8)


def wrong(size: int, seed: int, epoch: int, dataset: Any, kind: str) -> Any:
    return {"range": [0, size], "type": [0.5], "empty": np.empty(0, int), "length": range(size - epoch)}[kind]


def order_of(name: str, dataset: Any = None, seed: int = 3, **arguments: Any) -> EpochOrder:
    return EpochOrder({"type": name, **arguments}, dataset or Labelled(), seed)


def test_the_default_is_todays_order() -> None:
    """All samples, shuffled by (seed, epoch)."""
    shuffle = order_of("shuffle")
    plan = EpochPlan(shuffle, batch_size=12)
    for epoch in (0, 5):
        expected = torch.randperm(12, generator=torch.Generator().manual_seed(mix(3, epoch))).tolist()
        assert shuffle(epoch).tolist() == next(plan.global_batches(Position(epoch=epoch))).indices[0] == expected
    assert order_of("sequential")(4).tolist() == list(range(12))


def test_weights() -> None:
    """With replacement, in proportion: a sample of weight 0 never; by default, as many as there are samples."""
    weighted = order_of("weighted", samples=12_000)
    counts = Counter((weighted(2) % 12).tolist())
    assert set(counts) == set(range(1, 11))
    assert [round(counts[index] / 1000) for index in range(1, 11)] == [1] * 9 + [3]
    assert order_of("weighted").size == 12
    assert weighted(2).tolist() == order_of("weighted", samples=12_000)(2).tolist() != weighted(3).tolist()


def test_classes_equally_often() -> None:
    """Counts differ by one at most, among the classes and within one."""
    for samples, expected in ((None, [4, 4, 4]), (20, [6, 7, 7]), (2, [0, 1, 1])):
        balanced = order_of("balanced", samples=samples)
        for epoch in range(3):
            indices = balanced(epoch) % 12
            labels = Counter(Labelled.targets[index] for index in indices.tolist())
            assert sorted(labels[label] for label in range(3)) == expected
    counts = Counter((order_of("balanced", samples=36)(1) % 12).tolist())
    assert (counts[6], {counts[2], counts[10]}) == (12, {6})
    assert {counts[index] for index in range(12) if Labelled.targets[index] == 0} == {1, 2}


def test_a_repeated_sample_has_other_random_numbers() -> None:
    """Otherwise its copies would have the same augmentation."""
    found = KeyedBatches(Labelled(), list, seed=3).__getitems__((0, [6, 6 + 12, 6 + 24, 6]))
    assert [item["index"] for item in found] == [6] * 4
    noise = [tuple(item["noise"].tolist()) for item in found]
    assert (len(set(noise)), noise[0]) == (3, noise[3])
    assert noise[0] == tuple(seen(stream_of(Labelled(), seed=3), Position())[6])
    assert sorted(order_of("balanced", samples=36)(1).tolist())[-1] == 6 + 11 * 12
    narrow = order_of(f"{HERE}.repeated")(0)
    assert narrow.tolist() == [0, 3, 12, 24, 15] and narrow.dtype == np.int64


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("range", "for epoch 1, indices from 0 to 12, but the data set has 12 samples"),
        ("type", "type float64, not a list of indices"),
        ("empty", "shape \\(0,\\)"),
        ("length", "for epoch 2, 11 samples, but 12 in the first"),
    ],
)
def test_wrong_indices_are_refused(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        order_of(f"{HERE}.wrong", kind=kind)(1)


def test_what_an_order_needs_of_the_data_set() -> None:
    with pytest.raises(UserError, match="weighted needs an attribute or method weights of Noisy"):
        order_of("weighted", Noisy())
    with pytest.raises(UserError, match="balanced needs an attribute or method targets or labels of Noisy"):
        order_of("balanced", View(Noisy(), limit=4))
    short = Labelled()
    short.size = 13
    with pytest.raises(UserError, match=r"targets of Labelled has the shape \(12,\), not \(13,\)"):
        order_of("balanced", short)
    assert order_of("balanced", View(Labelled(), limit=3))(0).max() < 3 * 3


def test_global_generators_are_seeded() -> None:
    """An order that draws from them is the same on every rank, and leaves those of the loop alone."""
    torch.manual_seed(1), np.random.seed(1)
    first = order_of(f"{HERE}.unseeded")(2)
    np.random.seed(2)
    expected = np.random.get_state()[1].tolist()
    assert first.tolist() == order_of(f"{HERE}.unseeded")(2).tolist() != order_of(f"{HERE}.unseeded")(3).tolist()
    assert np.random.get_state()[1].tolist() == expected


def test_weights_of_the_epoch(runs: Runs) -> None:
    """The order sees the data set as it is in that epoch, also if only workers read."""
    data = ["--dataset.train", f"{{type: {HERE}.Curriculum}}", "--loader.order", "{type: weighted, samples: 64}"]
    alone = final(runs.train(*words("plain", *data), name="alone"))
    shared = final(runs.train(*words("plain", *data, "--worker", "2"), name="shared"))
    assert same(alone["latest"]["model"], shared["latest"]["model"])
    digits = Curriculum(PROJECT / "data", "train")
    weighted = order_of("weighted", digits)
    for epoch in (0, 1):
        assert digits.labels[weighted(epoch) % len(digits)].max() == 3 * (epoch + 1)


@pytest.mark.slow
def test_ranks_with_other_orders_are_refused(runs: Runs) -> None:
    told = refused(runs, 2, runs.words(*words("plain", "--loader.order", f"{{type: {HERE}.of_this_process}}")))
    assert "rank 1 has another loader.order than rank 0" in told


ORDERS = {
    "sequential": ["--loader.order.type", "sequential"],
    "balanced": ["--loader.order", "{type: balanced, samples: 150}", "--loader.drop_last", "true"],
    "weighted": [
        "--loader.order", "{type: weighted, samples: 200}", "--dataset.train.type", f"{HERE}.WeightedDigits",
    ],
    "pk": ["--loader.order", f"{{type: {HERE}.pk, samples: 8}}", "--optim.accumulate", "2"],
}  # fmt: skip
STEPS = {"sequential": 10, "balanced": 8, "weighted": 14, "pk": 6}


@pytest.mark.parametrize("kind", ORDERS)
def test_a_resume_inside_an_epoch(runs: Runs, kind: str) -> None:
    """The steps of an epoch are those of its order, which may be longer or shorter than the data set."""
    uncut, _ = same_after_cut(runs, "plain", *ORDERS[kind])
    assert load(uncut)["position"]["step"] == STEPS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["balanced", "weighted", "pk"])
def test_two_processes_are_one(runs: Runs, kind: str) -> None:
    """With workers, and each repeated sample with the random numbers that one process gives it."""
    same_for_both = ["--model", "{type: tests.parts.Plain}", "--precision.mode", "fp64"]
    alone = load(runs.train(*words("plain", *same_for_both, *ORDERS[kind]), name="alone"))
    more = [*same_for_both, *ORDERS[kind], "--batch_size", "16", "--worker", "2"]
    several(runs, 2, runs.words(*words("plain", *more), name="shared"))
    shared = load(runs.root / "shared")
    assert alone["position"] == shared["position"]
    for key, value in alone["model"].items():
        torch.testing.assert_close(shared["model"][key], value, rtol=0, atol=1e-12)


def test_an_order_that_is_not_there(runs: Runs) -> None:
    told = "did you mean balanced.*custom/.../<name>_order.py"
    with pytest.raises(UserError, match=told):
        runs.train("--loader.order.type", "balance")
    with pytest.raises(UserError, match=r"loader\.order\.samples = 0"):
        runs.train("--loader.order", "{type: weighted, samples: 0}")
    stream = "{type: tests.data.test_iterable.Stream}"
    with pytest.raises(UserError, match="Stream is read in its own order, so it cannot be balanced"):
        runs.train("--loader.order.type", "balanced", "--dataset.train", stream)
    runs.train("--loader.order.type", "sequential", "--dataset.train", stream, "--progress.max_steps", "1")


@pytest.mark.slow
def test_the_order_of_the_manual(tmp_path: Path) -> None:
    """docs/data.md: the file as it is printed there, found by its name."""
    project = copy_of_project(tmp_path / "project")
    text = (PROJECT / "docs" / "data.md").read_text(encoding="utf-8").partition("```python\n# custom/datasets/pk")[2]
    lines = text.partition("```")[0].splitlines()[1:]
    assert len(lines) <= 22
    (project / "custom" / "datasets" / "pk_order.py").write_text("\n".join(lines) + "\n")
    words = ["--config", "configs/default.yaml", "--progress.max_steps", "2", "--monitor.writers", "[]"]
    words += [
        "--loader.order",
        "{type: pk, classes: 8, samples: 4}",
        "--batch_size",
        "32",
        "--progress.epoch_val",
        "-1",
    ]
    ended = run([sys.executable, "train.py", *words], cwd=project, env={**ENVIRONMENT, "PYTHONPATH": str(project)})
    assert ended.returncode == 0, ended.stderr
    assert "37 steps per epoch" in ended.stderr + ended.stdout  # of 1,200 samples, 37 batches of 32
