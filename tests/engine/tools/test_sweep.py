"""tools.sweep under nohup, with a terminal that is lost, continued, and as a Slurm array of one task at a time."""

import signal
from pathlib import Path
from typing import Any

import pytest

from common.base.errors import UserError
from common.base.files import PROJECT
from common.config import dump, resolve
from tests.conftest import CONFIG
from tests.tools.test_sweep import words
from tools.sweep import __main__ as sweep
from tools.sweep import runs
from tools.sweep.space import Trial, read_space
from custom.config import Config


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


def test_a_lost_terminal_lets_the_runs_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be printed any more."""
    ended: list[str] = []

    class Process:
        def poll(self) -> None:
            raise KeyboardInterrupt

        terminate = wait = kill = lambda self: None

    def lost(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    class Running:
        def __init__(self, folder: Any, trial: Trial, *_: Any) -> None:
            self.trial, self.process, self.started = trial, Process(), 0.0

        def end(self, folder: Any) -> None:
            ended.append(self.trial.name)

    trial = Trial("a", {})
    monkeypatch.setattr("builtins.print", lost)
    monkeypatch.setattr(runs, "Training", Running)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        assert not runs.run_trials(runs.SweepFolder(tmp_path / "sweep", [trial], "again"), [trial], [[]], [])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended == ["a"]


def test_weights_whose_path_a_job_has_made_absolute(tmp_path: Path) -> None:
    """They are those of the command, given again."""
    trial = Trial("a", {}, resolve(Config, [CONFIG], ["--init_from.path", "weights.pt"]).values)
    root = tmp_path / "sweep"
    root.joinpath("a").mkdir(parents=True)
    (root / "a" / "status.json").write_text('{"state": "finished", "step": 1, "reason": "", "time": "", "pid": 1}')
    stored = {**trial.config, "init_from": {**trial.config["init_from"], "path": str(PROJECT / "weights.pt")}}
    (root / "a" / "config.yaml").write_text(dump(stored))
    assert runs.SweepFolder(root, [trial], "again").trials[0].state == "finished"
    (root / "a" / "config.yaml").write_text(dump({**stored, "init_from": {**stored["init_from"], "path": "/x.pt"}}))
    with pytest.raises(UserError, match=r"was trained with other settings:\n  init_from.path /x.pt -> weights.pt"):
        runs.SweepFolder(root, [trial], "again")


def test_a_setting_that_looks_like_a_value_of_the_grid() -> None:
    """Argparse takes an option with a space for one."""
    with pytest.raises(UserError, match=r"write values to try without --, and a setting of all runs before --grid"):
        read_space(["optim.lr=1e-2", "--dir.runs_dir=/data/my runs"])


def test_a_second_grid_adds_to_the_first() -> None:
    """It does not replace it without a word."""
    options = sweep.read_command(["-c", "a.yaml", "--grid", "optim.lr=1e-2,1e-3", "--grid", "model.width=16,32"])
    assert list(options.values) == ["optim.lr", "model.width"]
