"""Runs of earlier versions are read by the project of today; `tools/earlier_run.py` keeps another one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support import HERE, Render, release_order

KEPT = HERE / "earlier_runs"
COMMITS = sorted((each.name for each in KEPT.iterdir()), key=release_order)
RUN = Path("experiments/old")


@pytest.fixture
def project(render: Render, tmp_path: Path) -> Path:
    """A copy to run things in."""
    return Path(shutil.copytree(render(), tmp_path / "project"))


def call(project: Path, *words: str, program: str = sys.executable) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHON": sys.executable}
    done = subprocess.run([program, *words], cwd=project, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def measured(file: Path, event: str) -> dict[int, Any]:
    """Return the values of one kind of entry, by step."""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    return {entry["step"]: entry["values"] for entry in entries if entry["event"] == event}


@pytest.mark.slow
@pytest.mark.parametrize("commit", COMMITS)
def test_a_run_of_an_earlier_version(project: Path, tmp_path: Path, commit: str) -> None:
    """It is listed, looked into, evaluated, used to predict, exported, repeated and continued: the same numbers."""
    shutil.copytree(KEPT / commit, project / RUN, ignore=shutil.ignore_patterns("continued.jsonl"))
    best = str(RUN / "checkpoints" / "best.pt")
    before = measured(KEPT / commit / "metrics.jsonl", "val")[20]
    assert "old  finished" in call(project, "-m", "tools.runs")
    assert "step 20, epoch 2" in call(project, "-m", "tools.checkpoint", str(RUN))
    assert "left out" not in call(project, "evaluate.py", "--model_pt", best, "--split", "val")
    evaluated = json.loads((project / RUN / "eval" / "best_val" / "metrics.json").read_text())
    assert evaluated["values"] == pytest.approx(before, rel=1e-5)

    Image.new("L", (8, 8), 200).save(tmp_path / "digit.png")
    call(project, "predict.py", "--model_pt", str(RUN), "--input", str(tmp_path / "digit.png"))
    assert len((project / RUN / "predict" / "predictions.jsonl").read_text().splitlines()) == 1
    call(project, "-m", "tools.export", "--model_pt", str(RUN), "--to", "torch")
    assert list((project / RUN / "export").iterdir())
    call(project, str(RUN / "job.sh"), "--progress.max_steps", "1", program="sh")

    said = call(project, "train.py", "--resume", str(RUN), "--progress.epoch", "3")
    assert "at step 20, 0 samples into epoch 3" in said
    for event, steps in (("train", {25, 30}), ("val", {30}), ("eval", {30})):
        then = measured(KEPT / commit / "continued.jsonl", event)
        now = measured(project / RUN / "metrics.jsonl", event)
        assert then.keys() == steps
        shared = {step: {name: now[step][name] for name in then[step]} for step in steps}  # and what is newer
        assert shared == {step: pytest.approx(then[step], rel=1e-4) for step in steps}


def test_kept_runs_hold_nothing_of_the_machine_that_made_them() -> None:
    """They are small, too, and no event files are among them."""
    assert COMMITS
    for run in KEPT.iterdir():
        files = [file for file in run.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) < 160_000
        text = b"".join(file.read_bytes() for file in files)
        assert not any(word in text for word in (b"/tmp/", b"/home/", b"/root/", b"/usr/")), run
