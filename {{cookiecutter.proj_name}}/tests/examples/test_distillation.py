"""Distillation: the teacher stays as it was, and the student begins with a part of it."""

import sys

import pytest

import train
from tests.conftest import CONFIG, Runs, load, metrics, run, same
from tests.examples.runs import trained, words

EXAMPLE = "distillation/config"
TEACHER = [
    "--config", str(CONFIG), "--name", "teacher", "--model.width", "8", "--progress.epoch", "3",
    "--debug.max_samples", "160", "--progress.epoch_eval", "-1", "--monitor.writers", "[]",
]  # fmt: skip


@pytest.fixture
def student(runs: Runs) -> list[str]:
    """A trained teacher; the words for a student of it."""
    assert train.main([*TEACHER, "--dir.runs_dir", str(runs.root)]) == 0
    path = str(runs.root / "teacher" / "checkpoints" / "best.pt")
    return [
        "--task.teacher.width", "8", "--model.width", "8", "--task.weights", path, "--init_from.path", path,
        "--debug.max_samples", "160", "--progress.epoch_eval", "-1", "--optim.lr_scheduler", "{type: constant}",
    ]  # fmt: skip


def test_the_teacher_stays_and_the_student_begins_with_it(runs: Runs, student: list[str]) -> None:
    """Also its batch norm; the copied layer moves at a tenth of the rate."""
    folder = trained(runs, EXAMPLE, *student, "--optim.lr", "1e-9", "--progress.epoch", "1")
    teacher, state = load(runs.root / "teacher", "best")["model"], load(folder)
    fixed = {name.removeprefix("teacher."): value for name, value in state.get("task", {}).items()}
    assert not fixed or same(fixed, teacher)
    assert (state["model"]["features.0.0.weight"] - teacher["features.0.0.weight"]).abs().max() < 1e-7
    assert not any(name.startswith("teacher") for name in state["model"])
    rates = {name: group["lr"] for group in state["optimizer"]["param_groups"] for name in group["param_names"]}
    assert rates["features.0.0.weight"] == pytest.approx(0.1 * rates["head.weight"])
    assert not any("teacher" in name for name in rates)
    assert {"loss", "teacher", "CrossEntropyLoss"} < set(metrics(folder, "val")[-1]["values"])


def test_a_missing_teacher(runs: Runs) -> None:
    """One error, that names the file and what to do."""
    line = words(runs, EXAMPLE, "--task.weights", "no/teacher.pt", "--init_from.path", "null")
    ended = run([sys.executable, "train.py", *line])
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "no/teacher.pt" in ended.stderr
    assert "the first lines of the config say how to train a teacher" in ended.stderr
