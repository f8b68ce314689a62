"""Slurm without Slurm: stand-ins on the PATH record how they are called."""

import os
import shlex
from pathlib import Path

import pytest

# What each stand-in does besides noting how it was called. Variables say how it ends.
STAND_INS = {
    "sbatch": 'echo "${SBATCH_SAYS:-17}"; exit "${SBATCH_CODE:-0}"',
    "srun": (
        'while :; do case $1 in -*) shift ;; *) break ;; esac; done\n[ -n "${SRUN_CODE:-}" ] || exec "$@"\n'
        'exit "$SRUN_CODE"'
    ),
    "scontrol": (
        'case "$*" in *show*) echo "JobId=1 PreemptTime=${PREEMPT:-None}" ;; requeue*)\n'
        '    echo "${SCONTROL_SAYS:-}" >&2; exit "${SCONTROL_CODE:-0}" ;; esac'
    ),
    "squeue": 'printf "%s" "${QUEUE:-}"; printf "%s" "${QUEUE_ERROR:-}" >&2; [ -z "${QUEUE_ERROR:-}" ]',
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-ins are on the PATH; the file that they note their calls in, a line for each."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    for name, body in STAND_INS.items():
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{shlex.quote(str(calls))}\n{body}\n')
        (programs / name).chmod(0o755)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "TRAIN_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    calls.touch()
    return calls


def calls_of(cluster: Path, name: str) -> list[str]:
    lines = cluster.read_text().splitlines()
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]
