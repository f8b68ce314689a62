"""The order of an epoch's samples, by `loader.order`."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import ENVIRONMENT, PROJECT, Runs, copy_of_project, load, run
from tests.ranks import several
from tests.resume import same_after_cut, words

HERE = "tests.data.test_order"


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


ORDERS = {
    "sequential": ["--loader.order.type", "sequential"],
    "pk": ["--loader.order", f"{{type: {HERE}.pk, samples: 8}}", "--optim.accumulate", "2"],
}  # fmt: skip
STEPS = {"sequential": 10, "pk": 6}


@pytest.mark.parametrize("kind", ORDERS)
def test_a_resume_inside_an_epoch(runs: Runs, kind: str) -> None:
    """The steps of an epoch are those of its order, which may be longer or shorter than the dataset."""
    uncut, _ = same_after_cut(runs, "plain", *ORDERS[kind])
    assert load(uncut)["position"]["step"] == STEPS[kind]


@pytest.mark.slow
def test_two_processes_are_one(runs: Runs) -> None:
    """With workers, and each repeated sample with the random numbers that one process gives it."""
    same_for_both = ["--model", "{type: tests.small.Plain}", "--precision.mode", "fp64"]
    alone = load(runs.train(*words("plain", *same_for_both, *ORDERS["pk"]), name="alone"))
    more = [*same_for_both, *ORDERS["pk"], "--batch_size", "16", "--num_workers", "2"]
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
