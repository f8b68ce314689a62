"""tools.sweep --optuna of a rendered project with the real Optuna."""

import json
import os
import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from real import REPORT
from support import fresh
from test_data_tools import python as python  # a Python with the packages of recipes.txt

pytestmark = pytest.mark.slow

# Each step takes a while, so that there is time to stop a trial.
PLUGIN = "import time\n\n\ndef begin(trainer):\n    trainer.monitor.after_step.append(lambda: time.sleep(0.05))\n"
COMMAND = [
    "-m", "tools.sweep", "--optuna", "--config", "configs/default.yaml", "--name", "found", "--trials", "8",
    "--startup", "2", "--random", "optim.lr=log:1e-6:1e-1", "model.width=int:4:8", "--debug.max_samples", "160",
    "--batch_size", "32", "--progress.epoch", "5", "--progress.epoch_eval", "-1", "--monitor.writers", "[]",
    "--plugins", "[slowly:begin]",
]  # fmt: skip
STUDY = """
import json, optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
storage = JournalStorage(JournalFileBackend("experiments/found/optuna.journal"))
study = optuna.load_study(study_name=None, storage=storage)
print(json.dumps([[each.state.name, each.user_attrs.get("run"), each.value] for each in study.trials]))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, settings: Path) -> Path:
    root = fresh(tmp_path_factory.mktemp("out"), settings)
    (root / "slowly.py").write_text(PLUGIN)
    return root


def environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def run(root: Path, python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), *words]
    return subprocess.run(
        command, cwd=root, env=environment(root), capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.full
def test_a_search_survives_a_kill_and_ends_trials_that_are_worse(project: Path, python: Path) -> None:
    folder = project / "experiments" / "found"
    process = subprocess.Popen([str(python), *COMMAND], cwd=project, env=environment(project))
    try:
        end = time.monotonic() + 200
        while not list(folder.glob("002_*/checkpoints/latest.pt")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    done = run(project, python, *COMMAND)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads(run(project, python, "-c", STUDY).stdout)
    states = Counter(state for state, _, _ in trials)
    assert sum(states.values()) == 8
    assert states["PRUNED"] >= 1
    assert states["COMPLETE"] >= 3
    assert [name[:3] for _, name, _ in trials] == [f"{number:03}" for number in range(8)]
    resumed = (next(folder.glob("002_*")) / "train.log").read_text()
    assert "resumed at step" in resumed
    best = min((value, name) for state, name, value in trials if state == "COMPLETE")
    assert re.search(rf"best: {re.escape(best[1])}  loss {best[0]:.6g}$", done.stdout, re.MULTILINE)
    metrics = map(json.loads, (folder / best[1] / "metrics.jsonl").read_text().splitlines())
    assert best[0] == min(each["values"]["loss"] for each in metrics if each["event"] == "val")
    states_of_runs = Counter(json.loads(file.read_text())["state"] for file in folder.glob("*/status.json"))
    assert states_of_runs == {"finished": states["COMPLETE"], "stopped": states["PRUNED"]}
    more = run(project, python, *[word if word != "8" else "9" for word in COMMAND])
    assert more.returncode == 0
    assert more.stdout.count(": started") == 1
    other = run(project, python, *[word.replace("1e-6", "1e-5") for word in COMMAND])
    assert other.returncode == 2
    assert "holds a sweep of the same name that differs" in other.stderr
    REPORT.append(f"tools.sweep --optuna: {dict(states)}")


def test_without_optuna_there_is_one_clear_error(project: Path, python: Path, tmp_path: Path) -> None:
    (project / "optuna.py").write_text("raise ImportError('no module named optuna')\n")
    try:
        words = [word if word != "found" else "none" for word in COMMAND]
        done = run(project, python, *words)
    finally:
        (project / "optuna.py").unlink()
    assert done.returncode == 2
    assert "python -m pip install optuna" in done.stderr
    assert "Traceback" not in done.stderr
