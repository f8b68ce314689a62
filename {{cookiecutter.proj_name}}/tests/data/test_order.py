"""The order of an epoch's samples, by `loader.order`."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.data.order import EpochOrder
from tests.conftest import ENVIRONMENT, PROJECT, Runs, copy_of_project, load, run
from tests.data.test_data import Noisy
from tests.ranks import several
from tests.resume import same_after_cut, words
from tests.samples import Digits

HERE = "tests.data.test_order"


class Labelled(Noisy):
    """Class 0 has nine samples, 1 two, 2 one."""

    targets = (0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 0)

    def __init__(self) -> None:
        super().__init__(12)

    def weights(self) -> list[float]:
        return [0.0, *[1.0] * 9, 3.0, 0.0]


class WeightedDigits(Digits):
    """Digits of which the ones above 4 are drawn three times as often."""

    @property
    def weights(self) -> Tensor:
        return 1.0 + 2.0 * (self.labels > 4)


def pk(size: int, seed: int, epoch: int, dataset: Any, classes: int = 4, samples: int = 4) -> np.ndarray[Any, Any]:
    """Batches of `samples` samples each of `classes` classes, for metric learning."""
    generator = np.random.default_rng((seed, epoch))
    labels = np.asarray(dataset.labels)[:size]
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    batches = []
    for _ in range(size // (classes * samples)):
        for label in generator.choice(len(members), classes, replace=False):
            batches.append(generator.choice(members[label], samples, replace=len(members[label]) < samples))
    return np.concatenate(batches)


def repeated(size: int, seed: int, epoch: int, dataset: Any) -> np.ndarray[Any, Any]:
    return np.array([0, 3, 0, 0, 3], np.uint8)


def order_of(name: str, dataset: Any = None, seed: int = 3, **arguments: Any) -> EpochOrder:
    return EpochOrder({"type": name, **arguments}, dataset or Labelled(), seed)


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
    """The steps of an epoch are those of its order, which may be longer or shorter than the dataset."""
    uncut, _ = same_after_cut(runs, "plain", *ORDERS[kind])
    assert load(uncut)["position"]["step"] == STEPS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["balanced", "weighted", "pk"])
def test_two_processes_are_one(runs: Runs, kind: str) -> None:
    """With workers, and each repeated sample with the random numbers that one process gives it."""
    same_for_both = ["--model", "{type: tests.small.Plain}", "--precision.mode", "fp64"]
    alone = load(runs.train(*words("plain", *same_for_both, *ORDERS[kind]), name="alone"))
    more = [*same_for_both, *ORDERS[kind], "--batch_size", "16", "--num_workers", "2"]
    several(runs, 2, runs.words(*words("plain", *more), name="shared"))
    shared = load(runs.root / "shared")
    assert alone["position"] == shared["position"]
    for key, value in alone["model"].items():
        torch.testing.assert_close(shared["model"][key], value, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_order_of_the_manual(tmp_path: Path) -> None:
    """docs/data.md: the file as it is printed there, found by its name."""
    project = copy_of_project(tmp_path / "project")
    page = (PROJECT / "docs" / "data.md").read_text(encoding="utf-8")
    lines = page.partition("```python\n# custom/datasets/pk")[2].partition("```")[0].splitlines()[1:]
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
