"""Runs of the real programs, small enough to be done by the dozen."""

import functools
import inspect
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from torch.utils.data import DataLoader

from common.base.parts import installed
from common.data.workers import start_reading
from common.failure.program import report_errors
from common.monitor import log
from common.run import record
import evaluate
import train

PROJECT = Path(train.__file__).resolve().parent
# What the tests are written for; configs/default.yaml and the defaults in the classes are there to be changed.
CONFIG = PROJECT / "tests" / "base.yaml"
# One thread: sums do not depend on the machine, and processes do not fight for cores.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT), "PYTHONUNBUFFERED": "1"}
torch.set_num_threads(1)  # also for fixtures of a module, which come before those of a test
# Each run looks up the state of git, 50 ms, and the lines of its classes, 3 to 20 ms: once will do.
record.git_state = functools.cache(record.git_state)
inspect.getsourcelines = functools.cache(inspect.getsourcelines)  # type: ignore[assignment]
# What nohup, or a shell's &, has set to be ignored would be ignored by every program that a test starts.
for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

SMALL = {
    "--config": str(CONFIG),
    "--model.width": "4",
    "--debug.max_samples": "160",
    "--batch_size": "32",
    "--progress.epoch": "2",
    "--progress.epoch_eval": "-1",
    "--progress.log_every": "2",
    "--monitor.writers": "[]",
}
if "pictures" in installed():  # a picture takes as long as a step; what draws some says how many
    SMALL["--pictures.number"] = "0"


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(PROJECT)
    torch.set_num_threads(1)
    yield
    torch.autograd.set_detect_anomaly(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # of a run with dist.deterministic; a resume compares it


@pytest.fixture(autouse=True)
def _no_workers_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of runs that a test has cut off: a later test would wait for them, 5 s each, when they are collected."""
    iterators: list[Any] = []

    def noted(loader: DataLoader[Any]) -> Iterator[Any]:
        iterators.append(start_reading(loader))
        return iterators[-1]

    monkeypatch.setattr("common.data.workers.start_reading", noted)
    yield
    for iterator in iterators:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


ErrorOf = Callable[..., str]


@dataclass(frozen=True)
class Runs:
    """A place for runs; `experiments` of a user."""

    root: Path

    def words(self, *words: str, name: str = "run") -> list[str]:
        """Return the command line of a small run: these words, and the small settings that they do not replace."""
        given = {word.split("=")[0] for word in words if word.startswith("--")}
        kept = [
            (option, value)
            for option, value in {**SMALL, "--name": name, "--dir.runs_dir": str(self.root)}.items()
            if option not in given and not any(option.startswith(f"{other}.") for other in given)
        ]
        return [*(word for pair in kept for word in pair), *words]

    def train(self, *words: str, name: str = "run") -> Path:
        """Train in this process; the run's folder."""
        assert train.main(self.words(*words, name=name)) == 0
        return self.root / name

    def fail(self, *words: str, name: str = "run") -> int:
        """Train in this process and expect it to end otherwise; the exit code."""
        try:
            return train.main(self.words(*words, name=name))
        except SystemExit as error:
            return int(error.code or 0)


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with its output as text."""
    settings: dict[str, Any] = {"cwd": PROJECT, "env": ENVIRONMENT, "timeout": 120, **options}
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


# A stand-in for train.py that leaves how it was called.
TRAIN = "import sys\nopen('called.txt', 'w').write('\\n'.join(sys.argv))\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a stand-in for train.py, in a folder whose name a careless script trips over."""
    root = tmp_path / 'it\'s a "project" $HOME'
    root.mkdir()
    (root / "train.py").write_text(TRAIN)
    return root


@pytest.fixture
def restored_log() -> Iterator[None]:
    """What `setup_log` changes is global; put it back."""
    log._early.clear()  # what runs before this test said
    logging.captureWarnings(False)
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.captureWarnings(False)
    logger.remove()
    logger.add(sys.stderr)
    logger.configure(patcher=lambda record: None)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def copy_of_project(folder: Path) -> Path:
    """Return the project's code in another folder, where a test may edit it; with a link to the same data."""

    def left_out(parent: str, names: list[str]) -> set[str]:
        private = {"data", "experiments", "venv"} if Path(parent) == PROJECT else {"__pycache__"}
        return {name for name in names if name in private or name[0] == "."}

    shutil.copytree(PROJECT, folder, ignore=left_out, symlinks=True)
    (folder / "data").symlink_to(PROJECT / "data")
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def evaluated(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run evaluate.py in this process; what it left in metrics.json."""

    def call(model_pt: Path, *words: str) -> dict[str, Any]:
        assert evaluate.main(["--model_pt", str(model_pt), *words]) == 0
        split = words[words.index("--split") + 1] if "--split" in words else "eval"
        folder = model_pt.parent.parent / "eval" / (model_pt.stem if split == "eval" else f"{model_pt.stem}_{split}")
        return json.loads((folder / "metrics.json").read_text())

    return call


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str], runs: Runs) -> ErrorOf:
    """Run train.py (or evaluate.py) in this process, expect it to refuse, and return what a person reads."""

    def call(*words: str, program: str = "train") -> str:
        capsys.readouterr()
        main, arguments = (train.main, runs.words(*words)) if program == "train" else (evaluate.main, list(words))
        with pytest.raises(SystemExit) as ended, report_errors():
            main(arguments)
        text = capsys.readouterr().err
        assert ended.value.code == 2
        assert "Traceback" not in text
        last = text[text.rfind(" ERROR ") if " ERROR " in text else text.find("error: ") :]
        assert 0 < len(last.splitlines()) <= 24, text
        return " ".join(last.split())

    return call


def metrics(run_folder: Path, event: str) -> list[dict[str, Any]]:
    """Return the entries of one kind in metrics.jsonl."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


def load(run_folder: Path, name: str = "latest") -> dict[str, Any]:
    """Return a checkpoint of a run, read the only way it may be read."""
    return torch.load(run_folder / "checkpoints" / f"{name}.pt", weights_only=True)


def same(first: Any, second: Any) -> bool:
    """Return whether two nested values are equal to the last bit."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return (
            isinstance(second, dict) and first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
