"""Signals at bad moments: in the middle of a save, to the process that started the others, twice."""

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from common.progress import Position
from common.run.paths import RunPaths
from common.run.status import read_status
from common.trainer import Trainer
from tests.conftest import ENVIRONMENT, Runs, load, run, same
from tests.ranks import failed, several, start_ranks
from tests.resume import STEPS, measured, words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ([signal.SIGTERM, signal.SIGTERM], 143),
        ([signal.SIGUSR1, signal.SIGTERM], 75),
        ([signal.SIGINT], 130),
        ([signal.SIGINT, signal.SIGINT], 130),
    ],
    ids=["TERM twice", "USR1, TERM", "INT", "INT twice"],
)
def test_signals_during_a_save(
    runs: Runs, numbers: list[signal.Signals], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third save is half on the disk. It is completed, also at a second Ctrl-C."""
    uncut = measured(runs.train(*words("warm-up"), name="uncut"))
    sync, saves = os.fsync, []

    def signalled(file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        saves.extend([name] if "/checkpoints/" in name and name.endswith(".tmp") else [])
        if len(saves) == 5:  # a save brings its file to the disk twice: before it is linked, and before it is renamed
            saves.append("signalled")
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(3)  # one Ctrl-C may arrive twice within a second; on a busy machine the first is noted late
        sync(file)

    monkeypatch.setattr(os, "fsync", signalled)
    assert runs.fail(*words("warm-up"), name="cut") == code
    monkeypatch.setattr(os, "fsync", sync)
    at_once = len(numbers) == 2 and set(numbers) == {signal.SIGINT}
    assert load(runs.root / "cut")["position"]["step"] == (3 if at_once else 4)  # it looks after the next step
    assert read_status(RunPaths(runs.root / "cut"))["state"] == ("failed" if at_once else "stopped")
    assert not list((runs.root / "cut" / "checkpoints").glob("*.tmp"))
    assert same(measured(runs.train(*words("warm-up", "--resume", "auto"), name="cut")), uncut)


@pytest.mark.slow
def test_tests_under_nohup() -> None:
    """What a terminal's end or a Ctrl-C does can be tested from a session that is itself shielded from both."""
    say = "import tests.conftest, signal; print([signal.getsignal(n) for n in (1, 2)])"
    shielded = f"trap '' INT; exec nohup {shlex.quote(sys.executable)} -c {shlex.quote(say)}"
    done = run(["sh", "-c", shielded], stdin=subprocess.DEVNULL)
    assert "SIG_DFL" in done.stdout and "default_int_handler" in done.stdout, done.stdout + done.stderr


def stop_us(trainer: Trainer) -> None:
    """A plug-in: rank 1 asks the process that started all to stop, and sees its answer arrive before it continues."""
    stepped, number = trainer.monitor.step_done, int(os.environ.get("STOP_BY", "0"))

    def tell(position: Position, samples: int) -> None:
        stepped(position, samples)
        if number and trainer.rank.rank == 1 and position.step == 3:
            os.kill(os.getppid(), number)
            until = time.monotonic() + 20
            while not trainer.stop_signals.signal and time.monotonic() < until:
                time.sleep(0.01)

    trainer.monitor.step_done = tell  # type: ignore[assignment, method-assign]


@pytest.mark.slow
def test_two_processes_are_stopped_and_go_on(runs: Runs) -> None:
    """SIGTERM to `--dist.processes 2`: saved by both; the resumed run is, to the last bit, the uncut one."""
    argv = words("warm-up", "--batch_size", "16", "--plugins", f"[{__name__}:stop_us]", "--dist.processes", "2")
    several(runs, 2, runs.words(*argv, name="uncut"))
    command = [sys.executable, "train.py", *runs.words(*argv, name="cut")]
    done = run(command, env={**ENVIRONMENT, "STOP_BY": str(signal.SIGTERM.value)})
    assert done.returncode == 143, done.stderr
    assert read_status(RunPaths(runs.root / "cut"))["reason"] == "SIGTERM"
    assert 3 <= load(runs.root / "cut")["position"]["step"] < STEPS
    several(runs, 2, runs.words(*argv, "--resume", "auto", name="cut"))
    assert "this resume is bit-exact" in (runs.root / "cut" / "train.log").read_text()
    assert same(measured(runs.root / "cut"), measured(runs.root / "uncut"))


def interrupt_twice(trainer: Trainer) -> None:
    """A plug-in: Ctrl-C in a terminal, which every process gets, and again."""
    stepped = trainer.monitor.step_done

    def tell(position: Position, samples: int) -> None:
        stepped(position, samples)
        if position.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.1)  # one that comes sooner is the same one
            os.kill(os.getpid(), signal.SIGINT)

    trainer.monitor.step_done = tell  # type: ignore[assignment, method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_second_ctrl_c_leaves_at_once(runs: Runs, world: int) -> None:
    """Nothing is saved any more; the code and the record say so."""
    argv = runs.words("--plugins", "[engine.failure.test_signals:interrupt_twice]", "--batch_size", "16")
    ended = failed(start_ranks(runs.root, world, argv))
    assert 130 in ended.codes
    assert not list((runs.root / "run" / "checkpoints").glob("*.pt"))
    status = read_status(RunPaths(runs.root / "run"))
    assert (status["state"], "interrupted; exited immediately" in status["reason"]) == ("failed", True)
    assert "Traceback" not in ended.texts[0]
