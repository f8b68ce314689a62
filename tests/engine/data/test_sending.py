"""Workers that cannot send a batch, and batches that never come: the run ends, with a reason."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.base.process import EXIT_REQUEUE
from common.failure import signals
from tests.conftest import ENVIRONMENT, PROJECT, Runs
from tests.ranks import start_ranks
from tests.samples import Digits


class ManyTensors(Digits):
    """Each batch needs more open files than the process may have."""

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "parts": [torch.zeros(1) for _ in range(600)]}


class Unsendable(Digits):
    """A sample that can be collated, but not sent."""

    def collate(self, items: Any) -> Any:
        labels = torch.tensor([int(item["label"]) for item in items])
        return {"image": torch.stack([item["image"] for item in items]), "label": labels, "lock": threading.Lock()}


class Stuck(Digits):
    """One sample is never read. It says that it has come to it."""

    def __getitem__(self, index: int) -> Any:
        if self.mode == "train" and index == 77 and torch.utils.data.get_worker_info() is not None:
            Path(os.environ["STUCK"]).touch()
            time.sleep(1000)
        return super().__getitem__(index)

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.mode = mode


class Late(Digits):
    """A signal reaches the process that reads while one batch takes longer than it waits at a time."""

    random = False

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.mode = mode

    def __getitem__(self, index: int) -> Any:
        if self.mode == "train" and index == 77 and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(float(os.environ["LATE"]))
        return super().__getitem__(index)


class StuckStream:
    """The same, which can only be read in order."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.digits = Digits(data_dir, mode)

    def __iter__(self) -> Iterator[Any]:
        for index in range(160):
            if index == 77 and multiprocessing.parent_process() is not None:
                Path(os.environ["STUCK"]).touch()
                time.sleep(1000)
            yield self.digits[index]


def wait_no_longer() -> None:
    signals._WAIT_FOR_BATCH_S = 1.0


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("ManyTensors", "Too many open files (24)). If too many files are open"),
        ("Unsendable", "a worker process cannot send a batch (its error is above)"),
    ],
)
def test_a_batch_that_cannot_be_sent(runs: Runs, kind: str, said: str) -> None:
    words = [
        sys.executable,
        "train.py",
        *runs.words("--dataset.train", f"{{type: {__name__}.{kind}}}", "--num_workers", "1"),
    ]
    done = subprocess.run(
        words,
        cwd=PROJECT,
        env=ENVIRONMENT,
        preexec_fn=few_files,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr) < 20_000


@pytest.mark.slow
@pytest.mark.parametrize(("late", "code"), [("2.5", EXIT_REQUEUE), ("100", 2)])
def test_a_signal_while_other_processes_wait_for_the_batch(runs: Runs, late: str, code: int) -> None:
    """They need it to take a step, and so to save together: it is waited for, but not for ever."""
    words = runs.words("--dataset.train", f"{{type: {__name__}.Late}}", "--num_workers", "1")
    setup = wait_no_longer if code == 2 else None
    ended = start_ranks(runs.root, 2, words, environment={"LATE": late}, setup=setup)
    assert code in ended.codes and 0 not in ended.codes, ended.texts
    assert (runs.root / "run" / "checkpoints" / "latest.pt").exists() == (code == EXIT_REQUEUE)
    assert ("SIGUSR1 ends the run, but no batch has come since" in "".join(ended.texts)) == (code == 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Stuck", "StuckStream"])
def test_a_signal_while_a_batch_does_not_come(runs: Runs, kind: str) -> None:
    """The run is saved after its last step, and can be resumed."""
    words = [
        sys.executable,
        "train.py",
        *runs.words("--dataset.train", f"{{type: {__name__}.{kind}}}", "--num_workers", "1"),
    ]
    file = runs.root / "stuck"
    child = subprocess.Popen(
        words, cwd=PROJECT, env={**ENVIRONMENT, "STUCK": str(file)}, stderr=subprocess.PIPE, text=True
    )
    try:
        while not file.exists():
            assert child.poll() is None
            time.sleep(0.1)
        time.sleep(2)
        child.send_signal(signal.SIGTERM)
        said = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert child.returncode == 128 + signal.SIGTERM, said
    assert (runs.root / "run" / "checkpoints" / "latest.pt").exists()
