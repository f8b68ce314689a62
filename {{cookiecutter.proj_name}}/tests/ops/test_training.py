"""configs/ops.yaml, which trains a model with an operator in it: as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from tests.conftest import ENVIRONMENT, PROJECT, Runs, load, metrics
from tests.small import Killed

pytestmark = pytest.mark.usefixtures("build_dir")
CONFIG = ["--config", "configs/ops.yaml"]
MORTAL = ["--loss", "{$REPLACE: true, ce: {type: tests.small.Mortal}}", "--best.metric", "loss"]


def start(*words: str, build_dir: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, "OPS_BUILD_DIR": build_dir, **variables}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_trains_and_evaluates(tmp_path: Path, build_dir: str) -> None:
    """The shipped config, whole: at least 97 % of the digits, and a line that says which kernels ran."""
    done = start("train.py", *CONFIG, "--dir.runs_dir", str(tmp_path), build_dir=build_dir)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "ops" / "train.log").read_text()
    assert log.count("scale_exp: ") == 1
    assert ("scale_exp: C++ on the CPU" in log) == bool(list(Path(build_dir).glob("*.so")))
    best = tmp_path / "ops" / "checkpoints" / "best.pt"
    done = start("evaluate.py", "--model_pt", str(best), build_dir=build_dir)
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "ops" / "eval" / "best" / "metrics.json").read_text())["values"]
    assert values["Accuracy"] >= 0.97


def test_resumed_to_the_bit(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut inside the second epoch and resumed, it ends where the run that was never cut ends."""
    words = [*CONFIG, *MORTAL, "--progress.epoch_save_latest", "1step", "--checkpoint.background", "false"]
    uncut = runs.train(*words, name="uncut")
    monkeypatch.setenv("MORTAL_AT", "8")
    with pytest.raises(Killed):
        train.main(runs.words(*words, name="cut"))
    monkeypatch.delenv("MORTAL_AT")
    cut = runs.train(*words, "--resume", "auto", name="cut")
    assert metrics(cut, "val") == metrics(uncut, "val")
    first, second = load(uncut)["model"], load(cut)["model"]
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
def test_two_processes(runs: Runs, build_dir: str) -> None:
    """Two processes with half the batch each train what one does."""
    plain = ["--model", "{$REPLACE: true, type: tests.ops.test_training.NoBatchNorm}", "--precision.mode", "fp64"]
    words = [*CONFIG, *plain, "--progress.epoch", "1"]
    (one,) = metrics(runs.train(*words, name="one"), "val")
    shared = ["--batch_size", "16", "--dist.processes", "2"]
    done = start("train.py", *runs.words(*words, *shared, name="two"), build_dir=build_dir)
    assert done.returncode == 0, done.stderr
    (two,) = metrics(runs.root / "two", "val")
    assert one["values"]["loss"] == pytest.approx(two["values"]["loss"], rel=1e-9)


class NoBatchNorm(torch.nn.Module):
    """A model with the operator whose gradient is the mean over samples, however they are shared out."""

    def __init__(self) -> None:
        super().__init__()
        from custom.ops.saturating_model import Saturation

        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 16), Saturation(), torch.nn.Linear(16, 10)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image)
