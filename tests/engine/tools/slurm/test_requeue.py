"""Around the training of a Slurm job: how it starts, and who is queued again."""

import os
import signal
from pathlib import Path

import pytest

from common.failure import signals
from common.run.paths import RunPaths
from common.run.status import write_status
from tests.tools.slurm.conftest import calls_of
from tests.tools.slurm.test_requeue import end, start, starts_of
from tools.slurm import requeue


@pytest.fixture
def job(tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run whose job has just started for the first time."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    run = RunPaths(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    start(run)
    return run


def test_a_status_of_an_earlier_start_counts_for_nothing(job: RunPaths, cluster: Path) -> None:
    """The first start was stopped to continue; the second fell over before it could say anything."""
    write_status(job, "stopped", step=3, reason="SIGUSR1")
    start(job)
    assert end(job, 1) == 1
    assert calls_of(cluster, "scontrol requeue") == []


@pytest.mark.parametrize("how", ["refused", "missing"])
def test_a_job_that_cannot_be_queued_again(
    job: RunPaths, cluster: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    """Says so, how to continue, and ends with 75; a busy controller is asked again."""
    write_status(job, "stopped", step=3, reason="SIGUSR1")
    monkeypatch.setattr(requeue, "_PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setenv("SCONTROL_CODE", "1")
    monkeypatch.setenv("SCONTROL_SAYS", "Requested operation is presently disabled")
    if how == "missing":
        monkeypatch.setenv("PATH", "/nowhere")
    assert end(job, 75) == 75
    said = capfd.readouterr().err
    assert ("presently disabled" if how == "refused" else "No such file or directory: 'scontrol'") in said
    assert "--resume auto" in said
    assert len(calls_of(cluster, "scontrol")) == (3 if how == "refused" else 0)


def test_a_run_that_has_finished(job: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this very job: it has nothing left to do. What another one finished before does not count."""
    write_status(job, "finished", step=9)
    assert start(job)
    assert start(job)
    os.utime(job.status_file, ns=(0, starts_of(job).stat().st_mtime_ns - 1))
    assert not start(job)


def test_the_command_line_around_training(job: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """What a job file calls."""
    assert signals.exit_code(signal.SIGUSR1) == 75
    words = [str(job.root), str(starts_of(job))]
    write_status(job, "failed", step=3)
    assert requeue.main(["after", "7", *words]) == 7
    write_status(job, "finished", step=3)
    assert requeue.main(["before", *words]) == 0
    assert capsys.readouterr().out == "finished\n"
    assert requeue.main(["never"]) == 2


@pytest.mark.parametrize(
    ("reason", "code", "preempted", "expected"),
    [
        ("rank 1: SIGUSR1 ends the run, but no batch has come since", 2, "", 75),
        ("rank 1: killed by SIGTERM", 1, "2026-03-01T14:05:00", 75),
        ("rank 1: killed by SIGTERM", 0, "", 1),
        ("ValueError: x", 1, "2026-03-01T14:05:00", 1),
    ],
)
def test_what_failed_because_of_a_signal(
    job: RunPaths, cluster: Path, monkeypatch: pytest.MonkeyPatch, reason: str, code: int, preempted: str, expected: int
) -> None:
    """What was saved before is continued; the run could not save once more."""
    if preempted:
        monkeypatch.setenv("PREEMPT", preempted)
    write_status(job, "failed", step=3, reason=reason)
    assert end(job, code) == expected
    assert ("requeue 17" in calls_of(cluster, "scontrol")) == (expected == 75)
