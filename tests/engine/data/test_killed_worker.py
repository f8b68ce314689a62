"""A worker that is killed for lack of memory ends the run with that reason, whatever its pipe says first."""

import os
import pickle
import signal
import sys
import threading
from typing import Any

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.conftest import ENVIRONMENT, Runs, run

SAYS = "a worker was killed, probably out of memory"
ERRORS = [
    ConnectionResetError(104, "Connection reset by peer"), BrokenPipeError(32, "Broken pipe"), EOFError(),
    ConnectionRefusedError(111, "Connection refused"), FileNotFoundError(2, "No such file or directory"),
    pickle.UnpicklingError("pickle data was truncated"), RuntimeError("received 0 items of ancdata"),
]  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [*ERRORS[:2], *(pytest.param(error, marks=pytest.mark.slow) for error in ERRORS[2:])],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_pipe(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """Raised before the kernel reports the death: the signal that follows is not seen by torch here."""
    read = _MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._set_SIGCHLD_handler", lambda: None)

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        if self._rcvd_idx < 2:
            return read(self, *args, **options)
        os.kill(self._workers[0].pid, signal.SIGKILL)
        raise error

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_get_data", broken)
    assert runs.fail("--num_workers", "2") == 1
    assert SAYS in capsys.readouterr().err
    assert SAYS in (runs.root / "run" / "train.log").read_text()


def test_an_error_of_the_pipe_while_all_live(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays what it is."""

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr("common.data.workers._DEATH_WITHIN_S", 0.1)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_get_data", broken)
    assert runs.fail("--num_workers", "1") == 1
    text = capsys.readouterr().err
    assert "ConnectionResetError" in text and SAYS not in text


def kill_one(trainer: Any) -> None:
    """A plug-in: kill a worker of the training data, so many seconds after the first step.

    The evaluation has workers of its own. If one dies that will not read again, a run may end without an error: while a
    line is logged, loguru catches what torch raises in its signal handler.
    """

    def kill() -> None:
        if trainer.monitor.step == 1 and trainer.rank.is_main:
            worker = trainer.stream._loader._iterator._workers[0]
            threading.Timer(float(os.environ["KILL_AFTER"]), os.kill, (worker.pid, signal.SIGKILL)).start()

    trainer.monitor.after_step.append(kill)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.full)])
def test_killed_at_any_instant(runs: Runs, processes: int) -> None:
    """While its batch is read, unpickled, waited for, or not wanted at all."""
    for at in ("0", "0.0003", "0.01") if processes == 1 else ("0.001",):
        plugins = ["--plugins", "[engine.data.test_killed_worker:kill_one]", "--dist.processes", str(processes)]
        words = runs.words(*plugins, "--num_workers", "2", "--progress.epoch", "500", name=f"at{at}")
        done = run([sys.executable, "train.py", *words], env={**ENVIRONMENT, "KILL_AFTER": at})
        assert done.returncode == 1, done.stderr
        assert SAYS in done.stderr, done.stderr
