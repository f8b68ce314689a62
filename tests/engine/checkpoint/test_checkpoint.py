"""Checkpoints that cannot be lost, and files of weights."""

import errno
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from common.base.errors import UserError
from common.base.files import write_text
from common.checkpoint.file import CheckpointError, full_disk_named, link_file, read_checkpoint
from common.checkpoint.folder import CheckpointFolder
from common.checkpoint.saver import CheckpointConfig, Saver
from common.distributed import Rank
from common.progress import Position
from common.trainer import Trainer
import train
from engine.conftest import PICTURES
from tests.checkpoint.test_checkpoint import damage, state
from tests.conftest import PROJECT, Runs, load, metrics, run, same

KILLS = 100


@pytest.mark.slow
def test_killed_at_any_moment_of_saving(tmp_path: Path, record_property: Any) -> None:
    """100 times SIGKILL at a random moment; there is always a checkpoint, whole, and never an older one."""
    folder = CheckpointFolder(tmp_path, keep=2)
    generator = random.Random(0)
    done = 0
    for _ in range(KILLS):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # saves as fast as it can, and tells of each save that is done
            for step in range(done + 1, done + 1000):
                folder.save(state(step, 200_000), numbered=True, best=step % 2 == 0)
                os.write(writer, step.to_bytes(4, "little"))
            os._exit(0)
        os.close(writer)
        count = os.read(reader, 4)  # it is under way: from here on a kill may come at any moment
        time.sleep(generator.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        count += os.read(reader, 1 << 20)
        os.close(reader)
        done = int.from_bytes(count[-4:], "little")
        found = folder.newest()
        assert found is not None
        step = found.state["position"]["step"]
        assert step >= done
        assert (found.state["model"]["weight"] == step).all()
        done = step
    folder.clean()
    assert not list(tmp_path.glob(".*"))
    assert done >= KILLS
    record_property("kills", KILLS)


def test_the_furthest_whole_one_is_taken_whatever_its_name(tmp_path: Path) -> None:
    """By the step inside, not by date or name."""
    folder = CheckpointFolder(tmp_path)
    for step in (9, 10, 11):
        folder.save(state(step), numbered=True)
    for path in (folder.latest, tmp_path / "step_00000011.pt"):
        damage(path, "bit")
    os.utime(tmp_path / "step_00000009.pt", (2e9, 2e9))
    found = folder.newest()
    assert found is not None
    assert found.state["position"]["step"] == 10


def test_all_damaged_is_an_error_and_no_fresh_start(runs: Runs) -> None:
    """Nothing is silently begun anew over a run that cannot be read."""
    folder = runs.train("--progress.epoch", "1")
    for path in (folder / "checkpoints").glob("*.pt"):
        path.write_bytes(b"gone")
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        train.main(runs.words("--resume", "auto"))


def test_an_abandoned_continuation_is_set_aside(runs: Runs) -> None:
    """Going on from an older file: later ones neither push out new ones nor are taken for the newest."""
    words = ["--progress.epoch_save_checkpoint", "1", "--checkpoint.keep", "2"]
    folder = runs.train(*words, "--progress.epoch", "3") / "checkpoints"
    runs.train(*words, "--progress.epoch", "3", "--resume", str(folder / "step_00000010.pt"))
    names = {path.name for path in folder.iterdir()}
    assert {"step_00000015.pt", "abandoned_step_00000015.pt", "abandoned_best.pt"} <= names
    assert load(folder.parent)["position"]["step"] == 15


def test_a_resume_of_a_run_that_stopped_early_says_so(runs: Runs) -> None:
    words = ["--early_stop.patience", "1", "--best.min_delta", "100", "--progress.epoch", "3"]
    folder = runs.train(*words)
    runs.train(*words, "--resume", "auto")
    assert load(folder)["position"]["step"] == 10
    resumed = (folder / "train.log").read_text().split("resumed at step")[1]
    assert "stopped early here: loss has not improved for 1 validations (early_stop.patience)" in resumed
    assert metrics(folder, "end")[-1]["reason"] == "early_stop"


@pytest.mark.slow
def test_changed_optimizer_settings(runs: Runs) -> None:
    """With allow_changes the config's values are used; another optimizer is refused."""
    folder = runs.train("--progress.epoch", "1")
    words = ["--resume", "auto", "--allow_changes", "true"]
    runs.train(*words, "--optim.weight_decay", "0.3", "--optim.args", "{betas: [0.5, 0.9]}")
    group = load(folder)["optimizer"]["param_groups"][0]
    assert (group["weight_decay"], tuple(group["betas"])) == (0.3, (0.5, 0.9))
    assert runs.fail(*words, "--optim.optim_type", "SGD") == 2
    assert "the state of one optimizer does not fit another" in (folder / "train.log").read_text()


def test_the_new_best_is_there_before_the_old_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever step of saving fails, a best checkpoint is there."""
    folder = CheckpointFolder(tmp_path)
    folder.save(state(1), best=True)
    for name in ("os.fsync", "os.link", "pathlib.Path.replace"):
        with monkeypatch.context() as patch:

            def fail(*arguments: Any, **named: Any) -> None:
                raise OSError(errno.EIO, "broken")

            patch.setattr(name, fail)
            if name == "os.link":
                patch.setattr("shutil.copyfile", fail)
            with pytest.raises(OSError, match="broken"):
                folder.save(state(2), best=True)
        assert read_checkpoint(folder.best)["position"]["step"] == 1
        assert read_checkpoint(folder.latest)["position"]["step"] == 1
        assert not list(tmp_path.glob(".*"))


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut leaves the old file or the whole new one: flushed and synced first, then renamed."""
    done: list[tuple[str, int]] = []

    def synced(number: int) -> None:
        done.append(("synced", os.fstat(number).st_size))

    def renamed(source: Path, target: Path) -> Path:
        done.append((f"named {target.name}", source.stat().st_size))
        os.replace(source, target)
        return target

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr("pathlib.Path.replace", renamed)
    write_text(tmp_path / "status.json", "whole")
    assert done == [("synced", 5), ("named status.json", 5)]
    done.clear()
    CheckpointFolder(tmp_path).save(state(1), best=True)
    size = (tmp_path / "latest.pt").stat().st_size
    assert [name for name, _ in done] == ["synced", "named best.pt", "synced", "named latest.pt"]
    assert {each for _, each in done} == {size}


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (@, @))
import train
from common.failure.program import report_errors
with report_errors():
    sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk(runs: Runs, background: str) -> None:
    """The reason is told, old files stay, nothing half-written is left, training goes on, and at last the run fails."""
    model = ["--model.width", "96"]  # larger than anything else that a run writes
    folder = runs.train("--progress.epoch", "1", *model)
    size = (folder / "checkpoints" / "latest.pt").stat().st_size
    before = load(folder)
    words = runs.words(
        *model,
        "--resume",
        "auto",
        "--progress.epoch",
        "9",
        "--checkpoint.failures",
        "3",
        "--checkpoint.background",
        background,
    )
    done = run([sys.executable, "-c", FULL.replace("@", str(size // 2)), *words])
    assert done.returncode == 2, done.stderr
    assert "checkpoint not written: [Errno 27] File too large" in done.stderr
    assert "Training continues; it ends after 2 more in a row" in done.stderr
    assert "saving a checkpoint failed 3 times in a row" in done.stderr
    assert "Traceback" not in done.stderr
    assert same(before["model"], load(folder)["model"])
    assert not list((folder / "checkpoints").glob(".*"))


OPERATIONS = ("os.link", "os.unlink", "os.replace", "os.rename", "pathlib.Path.replace", "os.fsync")


@pytest.mark.slow
def test_killed_before_each_operation_of_a_save(tmp_path: Path) -> None:
    """There is a newest one, it is whole, and the one before it is another file; a resume finds the same."""
    for number in range(1, 100):
        folder = CheckpointFolder(tmp_path / str(number))
        folder.folder.mkdir()
        for step in (1, 2):
            folder.save(state(step), numbered=True)
        child = os.fork()
        if child == 0:
            left = [number]

            def die_at(real: Any, left: list[int] = left) -> Any:
                def call(*arguments: Any, **named: Any) -> Any:
                    left[0] -= 1
                    if not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*arguments, **named)

                return call

            for name in OPERATIONS:
                owner = Path if name.startswith("pathlib") else os
                setattr(owner, name.rpartition(".")[2], die_at(getattr(owner, name.rpartition(".")[2])))
            folder.save(state(3), numbered=True, best=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert not folder.latest.samefile(folder.previous)
        found = folder.newest()
        assert found and found.path == folder.latest and found.step in (2, 3)
        folder.clean()
        folder.rewind_to(found.path, found.step)
        assert not folder.previous.exists() or not folder.latest.samefile(folder.previous)
        damage(folder.latest, "bit")
        older = folder.newest()
        assert older and older.step in (found.step - 1, found.step)
        if status == 0:
            break
    assert number > 5 and found.step == 3


def as_nobody(action: Any) -> Any:
    """Call `action` as a user who is not root, for whom permissions count."""
    if os.geteuid():
        return action()
    os.seteuid(65534)
    try:
        return action()
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("what", ["latest.pt", "previous.pt", "."])
def test_without_permission_nothing_falls_back(what: str) -> None:
    """A file or folder that cannot be read says nothing about its bytes; Python has words for a folder."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        folder = CheckpointFolder(Path(name) / "checkpoints")
        folder.folder.mkdir()
        for step in (1, 2):
            folder.save(state(step))
        if what == "previous.pt":
            damage(folder.latest, "cut")
        (folder.folder / what).chmod(0)
        kind: type[Exception] = PermissionError if what == "." else UserError
        with pytest.raises(kind, match="Permission denied") as error:
            as_nobody(folder.newest)
        assert not isinstance(error.value, CheckpointError)
        (folder.folder / what).chmod(0o755)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), "Stale file handle"),
        (RuntimeError("unable to mmap 123 bytes from file <x>: Cannot allocate memory (12)"), "unable to mmap"),
        (RuntimeError("open file failed because of errno 24 on fopen: Too many open files"), "open file failed"),
    ],
)
def test_what_pytorch_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    """It reports refused system calls as errors of its own, some of them while it handles another error."""

    def fail(*_: Any, **__: Any) -> None:
        try:
            raise error
        except type(error):
            raise RuntimeError("something else") from None

    folder = CheckpointFolder(tmp_path)
    folder.save(state(1))
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(UserError, match=f"latest.pt cannot be read: {reason}"):
        folder.newest()


def test_a_save_that_fails_leaves_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint and the one before it, which it falls back to."""
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(state(step))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        folder.save(state(3))
    held = [read_checkpoint(path)["model"]["weight"].mean() for path in (folder.latest, folder.previous)]
    assert held == [2, 1]


def test_torch_names_the_full_disk() -> None:
    """torch.save itself says "unexpected pos" of a file that cannot grow."""
    with pytest.raises(OSError, match="No space"), open("/dev/full", "wb", buffering=0) as file, full_disk_named():
        torch.save(torch.ones(1000), file)


def test_training_survives_a_disk_that_is_full_for_a_while(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved again when there is room; the end of the run is a good one."""
    original, calls = CheckpointFolder.save, []

    def save(self: CheckpointFolder, *arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        return original(self, *arguments, **named)

    monkeypatch.setattr(CheckpointFolder, "save", save)
    folder = runs.train("--progress.epoch", "4", "--progress.epoch_val", "-1")
    assert "checkpoint not written: [Errno 28] No space left on device" in (folder / "train.log").read_text()
    assert load(folder)["position"]["epoch"] == 4


def full_for_a_while(trainer: Trainer) -> None:
    """A plug-in: between the third and the fifteenth step, nothing grows beyond 100 bytes."""
    stepped, unlimited = trainer.monitor.step_done, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(position: Position, samples: int) -> None:
        stepped(position, samples)
        if position.step in (3, 15):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 if position.step == 3 else unlimited[0], unlimited[1]))

    trainer.monitor.step_done = limited  # type: ignore[assignment, method-assign]


@pytest.mark.slow
def test_nothing_is_lost_while_the_disk_is_full(runs: Runs) -> None:
    """Pictures and evaluations' folders are left out with a word; log, numbers and checkpoints come when they can."""
    small = [
        "--progress.epoch", "4", "--monitor.writers", "[tensorboard]", "--pictures.files", "true",
        "--pictures.every", "2", *PICTURES, "--progress.epoch_eval", "1", "--checkpoint.failures", "100",
    ]  # fmt: skip
    uncut = runs.train(*small, name="uncut")
    plugin = ["--plugins", "[engine.checkpoint.test_checkpoint:full_for_a_while]"]
    done = run([sys.executable, "train.py", *runs.words(*small, *plugin)])
    assert done.returncode == 0, done.stderr
    assert "Logging error" not in done.stderr
    # TensorBoard's own thread says why it ends, once for each of the saves in between.
    assert done.stderr.count("Traceback") <= 3
    for message in ("train.log cannot be written", "a picture cannot be written", "writer tensorboard failed"):
        assert message in done.stderr, done.stderr
    folder = runs.root / "run"
    for event in ("train", "val", "eval"):
        assert [entry["values"] for entry in metrics(folder, event)] == [e["values"] for e in metrics(uncut, event)]
    # Of each record, the part that the terminal and the file have in common: "epoch 1/4 step  2/20".
    shown = re.findall(r"^\d\d:\d\d:\d\d [A-Z]{4,5} +(.*?)(?: \| .*)?$", done.stderr, re.MULTILINE)
    log = (folder / "train.log").read_text()
    assert len(shown) > 20 and [text for text in shown if text not in log] == []
    assert same(load(uncut)["model"], load(folder)["model"])
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"


def test_a_run_does_not_end_well_without_its_last_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("where the folder should be")
    saver = Saver(CheckpointFolder(tmp_path / "file"), CheckpointConfig(), Rank())
    saver.save(state(1))
    with pytest.raises(UserError, match="the last checkpoint could not be written"):
        saver.finish(lambda: 0)


def test_the_copy_is_of_the_moment_of_saving(tmp_path: Path) -> None:
    """In the background, training changes the weights while they are written; tied weights stay tied."""
    weight = torch.zeros(100_000)
    saver = Saver(CheckpointFolder(tmp_path), CheckpointConfig(), Rank())
    for step in (1, 2):
        weight.fill_(step)
        saver.save({"format": 1, "model": {"a": weight, "b": weight}, "position": {"step": step}})
        weight.fill_(-1)
    saver.finish(lambda: 0)
    saved = read_checkpoint(tmp_path / "latest.pt")["model"]
    assert (saved["a"] == 2).all()
    assert saved["a"].data_ptr() == saved["b"].data_ptr()
    first = saver._copy_to_host({"a": weight})["a"]
    assert saver._copy_to_host({"a": weight})["a"] is first  # the memory is used again


@pytest.mark.slow
def test_a_failed_run_is_not_written_to_any_more(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is given free when the last checkpoint is on the disk; then the error is told, which comes last."""
    original = CheckpointFolder.save

    def save(self: CheckpointFolder, *arguments: Any, **named: Any) -> Any:
        time.sleep(1)
        return original(self, *arguments, **named)

    monkeypatch.setattr(CheckpointFolder, "save", save)
    loss = "{$REPLACE: true, ce: {type: tests.small.NotANumber, after: 6}}"
    assert (
        runs.fail("--monitor.log_level", "DEBUG", "--loss", loss, "--progress.epoch_val", "-1", "--best.metric", "ce")
        == 2
    )
    folder = runs.root / "run"
    assert not (folder / "run.lock").exists()
    assert load(folder)["position"]["step"] == 5
    log = (folder / "train.log").read_text()
    assert log.index("saved latest.pt (step 5") < log.index("is not a finite number")


class Mode(str, Enum):
    """An enumeration of texts: `str` gives the names of its members."""

    MAX = "max"


def test_only_what_loads_safely_is_written(tmp_path: Path) -> None:
    """A NumPy number in a state is refused when it is saved, not when it is needed."""
    import numpy as np

    good = {**state(1), "user": {"mine": {"text": str(torch.__version__), "nested": (1, [2.0, None, True])}}}
    folder = CheckpointFolder(tmp_path)
    folder.save({**good, "version": torch.__version__})
    with pytest.raises(UserError, match=r"checkpoint.user.mine.best is of type numpy.float64"):
        folder.save({**state(1), "user": {"mine": {"best": np.float64(1)}}})
    assert type(read_checkpoint(folder.latest)["version"]) is str
    folder.save({**good, "version": Mode("max")})
    assert read_checkpoint(folder.latest)["version"] == Mode("max")


@pytest.mark.slow
def test_two_runs_never_write_one_folder(runs: Runs) -> None:
    """The second is refused; after a kill, the lock is free."""
    words = runs.words("--progress.epoch", "1000000", "--progress.epoch_val", "-1")
    command = [sys.executable, "train.py", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, cwd=PROJECT, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (runs.root / "run" / "checkpoints" / "latest.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        for more in ([], ["--resume", "auto"]):
            second = run([*command, *more])
            assert second.returncode == 2
            assert f"in use by process {child.pid}" in second.stderr
    finally:
        child.kill()
        child.wait()
    step = load(runs.root / "run")["position"]["step"]
    folder = runs.train("--resume", "auto", "--progress.max_steps", str(step + 3), "--progress.epoch", "null")
    assert load(folder)["position"]["step"] == step + 3


def test_weights_of_the_run_that_would_be_moved(runs: Runs) -> None:
    """Refused, since a resume would find the new run's weights in their place; the old run stays."""
    best = str(runs.train("--progress.epoch", "1") / "checkpoints" / "best.pt")
    with pytest.raises(UserError, match=r"init_from.path: .*best.pt.*another --name"):
        runs.train("--init_from.path", best)
    assert [path.name for path in runs.root.glob("run*")] == ["run"]
    renamed = runs.train("--init_from.path", best, "--progress.epoch", "1", name="renamed")
    assert load(renamed)["position"]["step"] == 5
    runs.train("--resume", "auto", "--init_from.path", best)  # nothing is moved, so nothing is wrong with that


def test_a_limit_was_not_left_behind() -> None:
    """The tests above must not have limited this process."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    """A copy of a relative link would lead nowhere in another folder."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "old" / "latest.pt").write_text("weights")
    (tmp_path / "chosen.pt").symlink_to("old/latest.pt")
    link_file(tmp_path / "chosen.pt", tmp_path / "new" / "latest.pt")
    assert (tmp_path / "new" / "latest.pt").read_text() == "weights"
