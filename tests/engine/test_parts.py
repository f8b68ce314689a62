"""Parts: the folder, its tests and its page are all of it. Without them all else works, and says what is missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT, PROJECT, SMALL

# What asks for a part, and what an earlier run of it has in its checkpoint.
ASKS = {
    "bad_steps": ["--optim.bad_steps.action", "skip"],
    "ema": ["--optim.ema.decay", "0.9"],
    "stages": ["--stages", "[{until: 1step}, {optim: {lr: 0.01}}]"],
}


def program(project: Path, name: str, *words: str) -> str:
    """Run a program of a project; returns its output and its exit code."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(project)}
    command = [sys.executable, f"{name}.py", *words]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}exit {done.returncode}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "ema" else pytest.mark.full) for name in ASKS])
def test_a_part_that_is_deleted(name: str, tmp_path: Path) -> None:
    """Its key is refused, as is a resume of a run that had it, by name and with the remedy; other runs work."""
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("experiments", "__pycache__", ".*"))
    settings = {**SMALL, "--config": "tests/base.yaml", "--num_workers": "0"}

    def train(run: str, *more: str, epochs: str = "1") -> str:
        words = [word for pair in {**settings, "--progress.epoch": epochs}.items() for word in pair]
        return program(project, "train", *words, "--name", run, *more)

    assert train("with", *ASKS[name]).endswith("exit 0")
    for path in (f"parts/{name}", f"tests/parts/{name}"):
        shutil.rmtree(project / path)
    (project / "docs" / "parts" / f"{name}.md").unlink()
    needs = f"needs parts/{name}, which this project does not have: make add PART={name}"

    assert needs in train("asks", *ASKS[name])
    assert train("without").endswith("exit 0")
    refused = train("with", "--resume", "auto", epochs="2")
    assert needs in refused and refused.endswith("exit 2")
    assert train("with", "--resume", "auto", "--allow_changes", epochs="2").endswith("exit 0")
    best = "experiments/with/checkpoints/best.pt"
    assert program(project, "evaluate", "--model_pt", best).endswith("exit 0")
