"""Around the training of a Slurm job: how it starts, and who is queued again."""

import time
from pathlib import Path

import pytest

from common.run.paths import RunPaths
from common.run.status import read_status, write_status
from tests.tools.slurm.conftest import calls_of
from tools.slurm import requeue


@pytest.fixture
def job(tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run whose job has just started for the first time."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    run = RunPaths(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    start(run)
    return run


def starts_of(run: RunPaths) -> Path:
    return run.root.with_name("starts.jsonl")


def start(run: RunPaths) -> bool:
    time.sleep(0.01)  # the kernel's clock for files ticks every 4 ms
    return requeue.before(run.root, starts_of(run))


def end(run: RunPaths, code: int) -> int:
    return requeue.after(code, run.root, starts_of(run))


@pytest.mark.parametrize(
    ("state", "reason", "code", "expected", "again"),
    [
        ("stopped", "SIGUSR1", 75, 75, True),
        ("stopped", "SIGUSR2", 75, 75, True),
        ("stopped", "SIGUSR1", 137, 75, True),  # srun killed the others when the first had left
        (None, "", 138, 75, True),  # the signal came while Python was being loaded
        ("finished", "finished", 0, 0, False),
        ("finished", "finished", 134, 0, False),  # a process fell over on its way out
        ("stopped", "SIGTERM", 143, 143, False),
        ("stopped", "SIGINT", 130, 130, False),
        ("failed", "ValueError: x", 1, 1, False),
        ("failed", "optim.lr: x", 2, 2, False),
        ("failed", "out of memory", 138, 138, False),
        ("running", "", 137, 137, False),  # killed
        (None, "", 2, 2, False),  # a mistake that was found before there was a run
    ],
)
def test_who_is_queued_again(
    job: RunPaths, cluster: Path, state: str | None, reason: str, code: int, expected: int, again: bool
) -> None:
    """Only what was stopped to be continued; decided by what the main process wrote, not by srun's code."""
    if state is not None:
        write_status(job, state, step=3, reason=reason)
    assert end(job, code) == expected
    assert ("requeue 17" in calls_of(cluster, "scontrol")) == again
    status = read_status(job)
    if state is None:
        assert status is None
    if state == "running":
        assert status is not None and (status["state"], status["reason"]) == ("failed", "the processes ended with 137")


def test_a_preempted_job_that_saved_in_time_is_queued_again(
    job: RunPaths, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm itself requeues only what it has to kill: one that ends within its grace time would be lost."""
    monkeypatch.setenv("PREEMPT", "2026-03-01T14:05:00")
    assert end(job, 143) == 75  # before there was anything to save
    write_status(job, "running", step=0)
    assert end(job, 1) == 1  # something else went wrong
    write_status(job, "stopped", step=3, reason="SIGTERM")
    assert end(job, 143) == 75
    assert calls_of(cluster, "scontrol").count("requeue 17") == 2


def test_a_job_that_gets_nowhere_is_stopped(job: RunPaths) -> None:
    """Three restarts without a newer checkpoint, however it was queued again; with one, the count starts anew."""
    for number in range(1, 6):
        if number == 3:
            (job.checkpoints / "latest.pt").touch()
        start(job)
    with pytest.raises(SystemExit, match="job 17 was queued again 3 times"):
        start(job)
