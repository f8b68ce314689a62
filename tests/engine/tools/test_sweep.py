"""tools.sweep under nohup, and as a Slurm array of one task at a time."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.tools.test_sweep import words
from tools.sweep import __main__ as sweep
from tools.sweep import runs


def test_a_lost_terminal_under_nohup_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal stays ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        folder: Any = None
        assert runs.run_trials(folder, [], [[]], [])
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.default_int_handler
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("jobs", "array"), [([], "0,1"), (["--jobs", "1"], "0,1%1")])
def test_tasks_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: list[str], array: str) -> None:
    """As many as Slurm likes, unless it is said."""
    script = tmp_path / "slurm.sh"
    script.write_text(f'printf "%s\\n" "$@" >{tmp_path}/called\n')
    monkeypatch.setattr(sweep, "SLURM", script)
    assert sweep.main(words(tmp_path, "--grid", "optim.lr=1e-2,1e-3", "--slurm.time", "5", *jobs)) == 0
    assert f"--slurm.array={array}" in (tmp_path / "called").read_text().splitlines()
