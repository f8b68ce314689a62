"""`checkpoint.after_save` with functions that are slow and that hang."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.checkpoint.file import read_checkpoint
from common.checkpoint.folder import CheckpointFolder
from common.run.paths import RunPaths
from common.run.status import read_status
from common.trainer import Trainer
import train
from parts.after_save import calls
from parts.after_save.calls import AfterSave, Saved, finish
from tests.checkpoint.test_checkpoint import state
from tests.conftest import PROJECT, Runs
from tests.ranks import start_ranks
from tools.record import run as record

HERE = "engine.checkpoint.test_after_save"
CALLS: list[tuple[str, int, float]] = []  # name, step, and what the file holds
GATE = threading.Event()


def wait(saved: Saved) -> None:
    """Note the call, and wait for the gate. The file must still be the one of the call, whatever was saved since."""
    held = read_checkpoint(saved.path)
    GATE.wait()
    assert read_checkpoint(saved.path)["model"]["weight"] == held["model"]["weight"]
    CALLS.append((saved.name, saved.step, float(held["model"]["weight"])))


def hang(saved: Saved) -> None:
    CALLS.append((saved.name, saved.step, 0.0))
    threading.Event().wait()


def stop(saved: Saved, number: int) -> None:
    """Send a signal, and hang."""
    os.kill(os.getpid(), number)
    hang(saved)


def upload(saved: Saved) -> None:
    """Send the signal that a cluster sends at the first file, and take a while for each."""
    if not CALLS:
        os.kill(os.getpid(), signal.SIGTERM)
    CALLS.append((saved.name, saved.step, 0.0))
    time.sleep(2)
    CALLS.append((saved.name, saved.step, 1.0))


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., list[Path]]:
    """Save a checkpoint of this step, all of whose numbers are the step. Returns its files."""
    CALLS.clear()
    GATE.clear()
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints", keep=1)
    folder.folder.mkdir(parents=True)
    written: list[Path] = []
    folder.after_write.append(lambda path, step: written.append(path))

    def save(number: int, **more: Any) -> list[Path]:
        written.clear()
        folder.save(state(number), **more)
        return list(written)

    return save


def left(folder: Path) -> list[Path]:
    return list(folder.glob(".*"))


def test_the_newest_of_each_name_is_next(saved: Any) -> None:
    """While one call takes long, later files replace those that wait, whose links go; a deleted file is still there."""
    function = AfterSave(f"{HERE}:wait")
    for step in range(1, 6):
        for path in saved(step, numbered=step in (1, 2)):
            function.add(path, step)
        time.sleep(0.2 * (step == 1))  # the first call begins
    assert not path.with_name("step_00000001.pt").exists()  # keep: 1
    assert len(left(path.parent)) == 4  # what is being read, and the newest of each name
    GATE.set()
    finish([function], lambda: 0)
    expected = [("latest.pt", 1, 1), ("step_00000001.pt", 1, 1), ("latest.pt", 5, 5), ("step_00000002.pt", 2, 2)]
    assert CALLS[0] == expected[0] and sorted(CALLS) == sorted(expected)
    assert not left(path.parent)


def test_a_function_that_hangs_does_not_keep_the_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while training nor at its end, where the log says it."""
    CALLS.clear()
    monkeypatch.setitem(calls._WAIT_S, 0, 0.2)
    folder = runs.train("--checkpoint.after_save", f"['{HERE}:hang']")
    said = (folder / "train.log").read_text()
    assert len(CALLS) == 1 and "step_00000010.pt (step 10" in said
    assert f"checkpoint.after_save {HERE}:hang did not finish and was abandoned" in said


def test_an_interrupt_hides_no_error(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of someone who does not want to wait for an upload, after the run has failed."""

    def interrupted(functions: Any, stopped_by: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parts.after_save.around.finish", interrupted)
    loss = "{$REPLACE: true, ce: {type: tests.small.NotANumber, after: 4}}"
    assert runs.fail("--checkpoint.after_save", f"['{HERE}:hang']", "--loss", loss) == 2
    status = read_status(RunPaths(runs.root / "run"))
    assert status is not None and "step 5 is not a finite number" in status["reason"]


def test_several_functions_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is stopped has 30 s for all."""
    monkeypatch.setitem(calls._WAIT_S, signal.SIGTERM, 1.0)
    functions = [AfterSave(f"{HERE}:hang") for _ in range(4)]
    for function in functions:
        function._names.put("latest.pt")
        monkeypatch.setattr(AfterSave, "is_busy", True)
    began = time.monotonic()
    finish(functions, lambda: signal.SIGTERM)
    assert time.monotonic() < began + 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_does_not_wait_long(runs: Runs, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """A job that is stopped has little time; what is left of the links goes with the process, or at the next start."""
    CALLS.clear()
    monkeypatch.setattr(calls, "_WAIT_S", {0: 60.0, signal.SIGTERM: 60.0, number: 3.0})
    section = f"[{{type: '{HERE}:stop', number: {int(number)}}}]"
    began = time.monotonic()
    assert train.main(runs.words("--checkpoint.after_save", section)) == 128 + number
    assert len(CALLS) == 1 and 3 <= time.monotonic() - began < 60
    checkpoints = runs.root / "run" / "checkpoints"
    assert left(checkpoints)
    assert train.main(runs.words("--resume", "auto")) == 0
    assert not left(checkpoints)


@pytest.mark.slow
def test_the_last_checkpoint_before_a_preemption_is_handed_over(runs: Runs) -> None:
    """The disk of a preempted machine may be gone with it."""
    CALLS.clear()
    assert train.main(runs.words("--checkpoint.after_save", f"['{HERE}:upload']")) == 128 + signal.SIGTERM
    newest = read_checkpoint(runs.root / "run" / "checkpoints" / "latest.pt")["position"]["step"]
    assert ("latest.pt", newest, 1.0) in CALLS


def take_long(saved: Saved) -> None:
    time.sleep(5)


@pytest.mark.slow
def test_other_processes_wait_for_an_upload(runs: Runs) -> None:
    """At the end of training, longer than for anything else."""
    words = runs.words("--checkpoint.after_save", f"['{HERE}:take_long']", "--dist.timeout", "3")
    assert start_ranks(runs.root, 2, words).codes == [0, 0]
    assert read_status(RunPaths(runs.root / "run"))["state"] == "finished"


def break_down(trainer: Trainer) -> None:
    """A plug-in: an error after the first save."""

    def after_step() -> None:
        if trainer.at.step == 7:
            raise ValueError("broken")

    trainer.monitor.after_step.append(after_step)


def test_what_was_saved_before_an_error_is_handed_over(runs: Runs) -> None:
    """An upload that has begun is not cut off."""
    CALLS.clear()
    words = ["--checkpoint.after_save", f"['{HERE}:upload_slowly']", "--plugins", f"['{HERE}:break_down']"]
    assert runs.fail(*words) == 1
    assert ("best.pt", 5, 1.0) in CALLS


def upload_slowly(saved: Saved) -> None:
    time.sleep(0.5)
    CALLS.append((saved.name, saved.step, 1.0))


@pytest.mark.slow
def test_a_signal_at_the_end_is_heard(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a call takes long: the run has ended, and only that call is waited for."""
    monkeypatch.setitem(calls._WAIT_S, signal.SIGTERM, 0.3)
    function, began = AfterSave(f"{HERE}:hang"), time.monotonic()
    for path in saved(1):
        function.add(path, 1)
    finish([function], lambda: signal.SIGTERM if time.monotonic() > began + 1.5 else 0)
    assert time.monotonic() - began < 5


def test_a_link_that_cannot_be_made_is_no_failed_save(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without links, with no space for a copy."""

    def no_space(source: Path, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(calls, "link_file", no_space)
    folder = runs.train("--checkpoint.after_save", f"['{HERE}:upload']", "--checkpoint.failures", "1")
    said = (folder / "train.log").read_text()
    assert "a link to latest.pt for checkpoint.after_save cannot be written" in said and "not written" not in said


def interrupt(saved: Saved) -> None:
    """Send the signal that a cluster sends."""
    os.kill(os.getpid(), signal.SIGTERM)


def note(saved: Saved, to: str) -> None:
    with (Path(to) / "calls.txt").open("a") as file:
        file.write(f"{saved.step}\n")


def test_a_signal_while_nothing_waits(runs: Runs) -> None:
    """Nothing is said to be unfinished."""
    assert train.main(runs.words("--checkpoint.after_save", f"['{HERE}:interrupt']")) == 128 + signal.SIGTERM
    assert "did not finish" not in (runs.root / "run" / "train.log").read_text()


@pytest.mark.slow
def test_a_trial_publishes_nothing(runs: Runs, tmp_path: Path) -> None:
    """What `tools.check`, `same`, `verify` and `bisect` train, and a run with `--debug`, is not for others."""
    section = f"[{{type: '{HERE}:note', to: {tmp_path}}}]"
    words = runs.words("--checkpoint.after_save", section, "--progress.epoch", "1", name="tried")
    record.train(PROJECT, words, tmp_path / "record", env={"PYTHONPATH": str(PROJECT.parent / "tests")})
    assert (runs.root / "tried" / "checkpoints" / "latest.pt").exists() and not (tmp_path / "calls.txt").exists()
    runs.train("--checkpoint.after_save", section, "--progress.epoch", "1", name="meant")
    assert (tmp_path / "calls.txt").exists()
    config = tmp_path / "mine.yaml"
    config.write_text(f"$BASE: {PROJECT}/configs/default.yaml\ncheckpoint: {{after_save: {section}}}\n")
    (tmp_path / "calls.txt").unlink()
    words = ["--debug", "--dir.runs_dir", str(tmp_path), "--monitor.writers", "[]", "--progress.epoch", "1"]
    assert train.main(["--config", str(config), *words]) == 0
    assert (tmp_path / "debug" / "checkpoints" / "latest.pt").exists() and not (tmp_path / "calls.txt").exists()
