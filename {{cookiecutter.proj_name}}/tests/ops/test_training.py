"""configs/ops.yaml, which trains a model with an operator in it: as a user runs it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from tests.conftest import ENVIRONMENT, PROJECT, Runs, load, metrics
from tests.parts import Killed

pytestmark = pytest.mark.usefixtures("build_dir")
CONFIG = ["--config", "configs/ops.yaml"]
MORTAL = ["--loss", "{$REPLACE: true, ce: {type: tests.parts.Mortal}}", "--best.metric", "loss"]


def start(*words: str, build_dir: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, "OPS_BUILD_DIR": build_dir, **variables}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_trains_and_evaluates(tmp_path: Path, build_dir: str) -> None:
    """CT-63: the shipped config, whole: at least 97 % of the digits, and a line that says which kernels ran."""
    done = start("train.py", *CONFIG, "--dir.expr_dir", str(tmp_path), build_dir=build_dir)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "ops" / "train.log").read_text()
    assert log.count("scale_exp: ") == 1
    assert ("scale_exp: C++ on the CPU" in log) == bool(list(Path(build_dir).glob("*.so")))
    best = tmp_path / "ops" / "checkpoints" / "best.pt"
    done = start("evaluate.py", "--model_pt", str(best), build_dir=build_dir)
    assert done.returncode == 0, done.stderr
    values = json.loads((tmp_path / "ops" / "eval" / "best" / "metrics.json").read_text())["values"]
    assert values["Accuracy"] >= 0.97


@pytest.mark.slow
def test_the_same_with_and_without_a_build(
    runs: Runs, build_dir: str, evaluated: Callable[..., dict[str, Any]]
) -> None:
    """XP-02: trained and evaluated by either, a model is the same but for the last digits."""
    words = [*CONFIG, "--precision.mode", "fp64"]
    first = runs.train(*words, name="built")
    done = start("train.py", *runs.words(*words, name="reference"), build_dir=str(runs.root / "empty"))
    assert done.returncode == 0, done.stderr
    second = runs.root / "reference"
    assert "scale_exp: Python reference" in (second / "train.log").read_text()
    done = start("evaluate.py", "--model_pt", str(second / "checkpoints" / "latest.pt"), build_dir="/nowhere")
    assert done.returncode == 0, done.stderr
    reference = json.loads((second / "eval" / "latest" / "metrics.json").read_text())["values"]
    assert evaluated(first / "checkpoints" / "latest.pt")["values"] == pytest.approx(reference, rel=1e-9)
    for key, value in load(first)["model"].items():
        torch.testing.assert_close(value, load(second)["model"][key], rtol=1e-7, atol=1e-9)


def test_resumed_to_the_bit(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """CT-63: cut inside the second epoch and resumed, it ends where the run that was never cut ends."""
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
def test_a_resume_with_other_kernels(runs: Runs, build_dir: str) -> None:
    """R-47: a run on the reference that is resumed with a build is not called bit-exact."""
    libraries = [path.name for path in Path(build_dir).glob("*.so")]
    if not libraries:
        pytest.skip("nothing is built in this run")
    words = runs.words(*CONFIG, "--progress.epoch", "1")
    assert start("train.py", *words, build_dir="/nowhere").returncode == 0
    words = runs.words(*CONFIG, "--progress.epoch", "2", "--resume", "auto")
    assert start("train.py", *words, build_dir=build_dir).returncode == 0
    assert (
        f"sample-exact, not bit-exact (libraries none -> {libraries[0]})"
        in (runs.root / "run" / "train.log").read_text()
    )


@pytest.mark.slow
def test_two_processes(runs: Runs, build_dir: str) -> None:
    """CT-63: two processes with half the batch each train what one does, with DDP and with FSDP."""
    plain = ["--model", "{$REPLACE: true, type: tests.ops.test_training.NoBatchNorm}", "--precision.mode", "fp64"]
    words = [*CONFIG, *plain, "--progress.epoch", "1"]
    (one,) = metrics(runs.train(*words, name="one"), "val")
    for strategy in ("ddp", "fsdp"):
        shared = ["--batch_size", "16", "--dist.processes", "2", "--dist.strategy", strategy]
        done = start("train.py", *runs.words(*words, *shared, name=strategy), build_dir=build_dir)
        assert done.returncode == 0, done.stderr
        (two,) = metrics(runs.root / strategy, "val")
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


@pytest.mark.slow
def test_a_build_that_is_out_of_date_is_said(runs: Runs, build_dir: str) -> None:
    """D-54: never loaded in silence; the warning names what has changed and what to type."""
    libraries = list(Path(build_dir).glob("*.so"))
    if not libraries:
        pytest.skip("nothing is built in this run")
    stale = runs.root / "stale"
    stale.mkdir()
    for file in (libraries[0], libraries[0].with_suffix(".json")):
        (stale / file.name).write_bytes(file.read_bytes())
    record = stale / libraries[0].with_suffix(".json").name
    record.write_text(record.read_text().replace(torch.__version__, "2.10.0"))
    done = start("train.py", *runs.words(*CONFIG, "--progress.epoch", "1"), build_dir=str(stale))
    assert done.returncode == 0, done.stderr
    assert f"out of date (made for PyTorch 2.10.0, and this is {torch.__version__})" in done.stderr
    assert "sh scripts/install_ops.sh" in done.stderr
    log = (runs.root / "run" / "train.log").read_text()
    assert "out of date" in log and "scale_exp: Python reference" in log
    assert os.environ["OPS_BUILD_DIR"] == build_dir
