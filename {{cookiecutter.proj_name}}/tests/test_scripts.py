"""The shell scripts: as a user runs them, and with a stand-in for Python that only prints how it was called."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ENVIRONMENT, Runs, run

ROOT = Path(__file__).resolve().parent.parent
SHELL = shutil.which("dash") or shutil.which("sh")

pytestmark = pytest.mark.skipif(SHELL is None, reason="needs a POSIX shell")


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """call("cpu.sh", "--name", "x", GPUS="0") -> working folder and arguments of what it starts, one a line."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\npwd -P\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # scripts must work from anywhere

    def start(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": str(python), "GPUS": "", **variables}
        command = [SHELL or "sh", str(ROOT / "scripts" / script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    return start


def test_cpu_runs_in_the_project_and_passes_arguments_on(call) -> None:
    """An argument with a space stays one argument."""
    folder, *arguments = call("cpu.sh", "--name", "a b").stdout.splitlines()
    assert Path(folder) == ROOT
    assert arguments == ["train.py", "--gpu_ids", "-1", "--config", "configs/default.yaml", "--name", "a b"]


@pytest.mark.parametrize(("gpus", "ids"), [("0,2,3", "0,2,3"), ("1", "1"), ("", "all")])
def test_gpu_names_the_devices(call, gpus: str, ids: str) -> None:
    """The program itself starts one process for each."""
    arguments = call("gpu.sh", "--name", "x", GPUS=gpus).stdout.splitlines()[1:]
    assert arguments == ["train.py", "--gpu_ids", ids, "--config", "configs/default.yaml", "--name", "x"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs, so the script finds them")
def test_no_gpu_is_said_and_fails() -> None:
    done = run([SHELL or "sh", "scripts/gpu.sh"], env={**ENVIRONMENT, "PYTHON": sys.executable})
    assert done.returncode == 2
    assert "gpu_ids: all" in done.stderr and "--gpu_ids -1" in done.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "scripts").glob("*.sh")))
def test_scripts_can_be_run_by_name(name: str) -> None:
    assert os.access(ROOT / "scripts" / name, os.X_OK)


@pytest.mark.parametrize(
    "words",
    [
        ["scripts/cpu.sh"],
        ["scripts/eval.sh", "best.pt"],
    ],
)
def test_python_without_the_dependencies(words: list[str], tmp_path: Path) -> None:
    """One line that says what is missing, for which Python, and how to install it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')  # without site-packages
    python.chmod(0o755)
    done = run([SHELL or "sh", *words], env={**ENVIRONMENT, "PYTHON": str(python), "PYTHONPATH": ""})
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "torch" in done.stderr and f"{sys.executable} -m pip install -r" in done.stderr


@pytest.mark.slow
def test_train_and_evaluate_as_a_user_does(runs: Runs) -> None:
    """cpu.sh, then eval.sh with what it has left, for real; `best.pt` as seen from where the user is."""
    environment = {**ENVIRONMENT, "PYTHON": sys.executable, "PYTHONPATH": ""}
    words = runs.words("--progress.epoch", "1")
    done = run([SHELL or "sh", str(ROOT / "scripts" / "cpu.sh"), *words], env=environment, cwd=runs.root)
    assert done.returncode == 0, done.stderr
    best = runs.root / "run" / "checkpoints" / "best.pt"
    done = run([SHELL or "sh", str(ROOT / "scripts" / "eval.sh"), best.name], env=environment, cwd=best.parent)
    assert done.returncode == 0, done.stderr
    assert "Accuracy" in done.stdout
    assert json.loads((runs.root / "run" / "eval" / "best" / "metrics.json").read_text())["samples"] == 160


def test_eval_finds_a_relative_checkpoint_from_where_the_user_stands(call, tmp_path: Path) -> None:
    (tmp_path / "best model.pt").touch()
    folder, program, *arguments = call("eval.sh", "best model.pt", "--gpu_ids", "0").stdout.splitlines()
    assert Path(folder).samefile(tmp_path) and Path(program).samefile(ROOT / "evaluate.py")
    assert arguments == ["--model_pt", "best model.pt", "--gpu_ids", "0"]
