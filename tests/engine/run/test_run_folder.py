"""The run's folder: nothing is overwritten, and one writer at a time."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from loguru import logger

from common.base.errors import UserError
from common.distributed import Rank
from common.run.folder import OpenRun, open_run
from common.run.paths import DirConfig, RunPaths, data_dir
from common.run.record import describe_start, environment_text
from common.run.status import FolderLock, read_status, write_status
import train
from evaluate import eval_dir
from tests.conftest import PROJECT, Runs, load
from tests.ranks import start_ranks


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What is logged during the test."""
    lines: list[str] = []
    number = logger.add(lines.append, format="{message}")
    yield lines
    logger.remove(number)


def open_(project: Path, name: str = "digits", **changes) -> OpenRun:
    folder = changes.pop("folder", None) or RunPaths.for_run(DirConfig(), name, project)
    values, resume = changes.pop("values", {"name": name}), changes.pop("resume", False)
    attempt, patch = describe_start(project, **{"argv": ["train.py"], "seed": 7, "rank": Rank(), **changes})
    return open_run(folder, values, attempt, patch, resume=resume)


def test_paths_are_below_the_project_wherever_the_command_is_given(tmp_path, monkeypatch):
    """Paths are worked out alike on every process, without touching the disk."""
    monkeypatch.chdir("/")
    run = RunPaths.for_run(DirConfig(), "a", tmp_path)
    assert run.root == tmp_path / "experiments/a"
    assert (run.checkpoints, run.eval) == (run.root / "checkpoints", run.root / "eval")
    assert run.log_file(3) != run.log_file(0)
    assert data_dir(None, tmp_path) == tmp_path / "data"
    assert data_dir("d", tmp_path) == tmp_path / "d"
    assert RunPaths.for_run(DirConfig(runs_dir="/scratch"), "a", tmp_path).root == Path("/scratch/a")
    assert eval_dir(DirConfig(), run.checkpoints / "best.pt", "eval", tmp_path) == run.eval / "best"
    assert eval_dir(DirConfig(), run.checkpoints / "best.pt", "val", tmp_path) == run.eval / "best_val"
    assert eval_dir(DirConfig(eval_dir="out"), run.checkpoints / "best.pt", "val", tmp_path) == tmp_path / "out"
    assert list(tmp_path.iterdir()) == []


def test_the_record_says_what_ran(project):
    """Command line, seed, versions and complete configuration are kept."""
    rank = Rank(world_size=2, launcher="mpi", local_world=2)
    values = {"name": "digits", "optim": {"lr": 1e-05, "note": "1e-5"}, "list": [1, None]}
    with closing(open_(project, values=values, argv=["train.py", "--config", "a b.yaml"], rank=rank)) as run:
        assert yaml.safe_load(run.folder.config_file.read_text()) == values
        (attempt,) = json.loads(run.folder.record_file.read_text())["attempts"]
    assert attempt["argv"] == ["train.py", "--config", "a b.yaml"]
    assert attempt["command"].endswith("train.py --config 'a b.yaml'")
    assert (attempt["seed"], attempt["world_size"], attempt["launcher"]) == (7, 2, "mpi")
    assert attempt["machine"]["python"].startswith("3.")
    assert "torch" in environment_text(attempt)


def test_the_environment_is_not_recorded(project, monkeypatch):
    """Variables hold tokens; none of them reaches the folder."""
    monkeypatch.setenv("SECRET_TOKEN", "canary-4711")
    with closing(open_(project)) as run:
        texts = [path.read_text() for path in run.folder.root.rglob("*") if path.is_file()]
    assert len(texts) == 4
    assert not any("canary-4711" in text for text in texts)


def test_a_second_run_of_the_same_name_moves_the_first(project):
    """An old run is never overwritten."""
    with closing(open_(project)) as first:
        (first.folder.checkpoints / "best.pt").write_text("precious")
    start = first.record["time"].partition("+")[0].replace("-", "").replace(":", "").replace("T", "-")
    for _ in range(2):
        with closing(open_(project)) as run:
            assert run.attempt == 1
            assert list(run.folder.checkpoints.iterdir()) == []
    moved = run.folder.root.with_name(f"digits_{start}")
    assert (moved / "checkpoints/best.pt").read_text() == "precious"
    assert len(list(moved.parent.iterdir())) == 3  # the same second twice is no reason to lose one
    assert not list(moved.parent.glob("*/run.lock"))


def test_a_folder_with_checkpoints_is_moved_too(project):
    """Even without a record of the run that wrote them."""
    stray = project / "experiments/digits/checkpoints/best.pt"
    stray.parent.mkdir(parents=True)
    stray.write_text("mine")
    with closing(open_(project)):
        (moved,) = (project / "experiments").glob("digits_*")
    assert (moved / "checkpoints/best.pt").read_text() == "mine"


def test_the_status_before_a_refused_resume_is_no_news(runs: Runs) -> None:
    """Slurm's script and the sweep would take a status that is newer than their start for that of this attempt."""
    folder = runs.train()
    status = folder / "status.json"
    before = status.read_text()
    assert runs.fail("--resume", "auto", "--optim.lr", "0.5") == 2
    assert status.read_text() == before and status.stat().st_mtime == 0


def test_a_run_that_is_refused_keeps_the_earlier_one(runs: Runs) -> None:
    """Its mistake is found before the first step, but after the earlier run was moved, which gets its name back."""
    folder = runs.train()
    before = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for failed in ("run_failed", "run_failed-2"):
        assert runs.fail(*runs.words("--optim.no_decay", "[nothing.*]", "--optim.weight_decay", "0.1")) == 2
        assert {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        log = (runs.root / failed / "train.log").read_text()
        assert f"{folder} is the earlier run again; the failed one is now {runs.root / failed}" in log
        assert "nothing.* matches none" in log
        assert not list(runs.root.glob("*/run.lock"))
    assert sorted(path.name for path in runs.root.iterdir()) == ["run", "run_failed", "run_failed-2"]


def test_a_crash_before_the_first_step_keeps_its_files(runs: Runs) -> None:
    """What it left behind may be needed to find the cause; the earlier run has its name again, and can be resumed."""
    runs.train("--progress.max_steps", "1")
    ended = start_ranks(runs.root, 2, runs.words("--plugins", "[engine.run.test_run_folder:crash]"))
    assert all(ended.codes)
    assert sorted(path.name for path in runs.root.iterdir() if path.is_dir()) == ["run", "run_failed"]
    assert "a mistake in a plugin" in (runs.root / "run_failed" / "train.log").read_text()
    runs.train("--resume", "auto", "--progress.max_steps", "2")
    assert load(runs.root / "run")["position"]["step"] == 2


def test_a_resume_that_crashes_before_its_first_step_leaves_the_config_of_the_run(runs: Runs) -> None:
    """The next resume takes the settings that have trained; the status and the log say what happened."""
    folder = runs.train("--progress.max_steps", "1")
    record = (folder / "run.json").read_text()
    more = ("--resume", str(folder), "--progress.max_steps", "2")
    plugin = ("--plugins", "[engine.run.test_run_folder:crash]")
    assert runs.fail(*more, *plugin, "--batch_size", "16", "--allow_changes", "true") == 1
    assert (folder / "run.json").read_text() == record
    assert not (folder / "config.resume-1.yaml").exists()
    assert (read_status(RunPaths(folder)) or {})["state"] == "failed"
    assert "a mistake in a plugin" in (folder / "train.log").read_text()
    assert train.main([*more]) == 0


def crash(trainer: object) -> None:
    raise RuntimeError("a mistake in a plugin")


def test_a_resume_keeps_everything(project):
    """The first configuration stays; each resume adds its own beside it, and an entry to the record."""
    with closing(open_(project, values={"lr": 1})) as first:
        before = first.folder.config_file.read_text()
    for lr in (2, 3):
        with closing(open_(project, resume=True, values={"lr": lr}, seed=8)) as run:
            assert (run.attempt, run.id) == (lr, first.id)
    assert run.folder.config_file.read_text() == before
    assert yaml.safe_load((run.folder.root / "config.resume-2.yaml").read_text()) == {"lr": 3}
    attempts = json.loads(run.folder.record_file.read_text())["attempts"]
    assert [attempt["config"] for attempt in attempts] == [
        "config.yaml",
        "config.resume-1.yaml",
        "config.resume-2.yaml",
    ]


def test_a_resume_survives_a_lost_record(project):
    """Even then the first configuration is not overwritten."""
    with closing(open_(project, values={"lr": 1})) as first:
        first.folder.record_file.unlink()
    with closing(open_(project, resume=True, values={"lr": 2})):
        assert yaml.safe_load(first.folder.config_file.read_text()) == {"lr": 1}
        assert yaml.safe_load((first.folder.root / "config.resume-1.yaml").read_text()) == {"lr": 2}


@pytest.mark.parametrize("resume", [True, False])
def test_two_processes_never_write_one_folder(project, resume):
    """The second learns which process holds it, and touches nothing."""
    code = (
        "import sys, time; from pathlib import Path; from common.run.status import FolderLock\n"
        "lock = FolderLock.take(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    run = RunPaths.for_run(DirConfig(), "digits", project)
    run.root.mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(run.lock_file)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=rf"in use by process {holder.pid} .*--name"):
            open_(project, resume=resume)
        run.checkpoints.mkdir()  # now there is something to move
        with pytest.raises(UserError, match=rf"in use by process {holder.pid} .*--name"):
            open_(project, resume=resume)
        assert sorted(path.name for path in run.root.iterdir()) == ["checkpoints", "run.lock"]
    finally:
        holder.kill()
        holder.wait()
    with closing(open_(project, resume=resume)) as taken:  # a killed holder holds nothing
        assert taken.lock.path.exists()


def test_a_killed_holder_holds_nothing(project):
    """The kernel has freed its lock; the file it left names the new holder."""
    lock = RunPaths.for_run(DirConfig(), "digits", project).lock_file
    lock.parent.mkdir(parents=True)
    lock.write_text("process 1 on node17 since then, and more than the next holder has to say" * 9)
    with closing(open_(project, resume=True)):
        assert lock.read_text().startswith(f"process {os.getpid()} on {socket.gethostname()}")
        assert "node17" not in lock.read_text()


def test_a_lock_that_a_dead_machine_left_on_the_server(project):
    """The message says whose it is, and how to continue."""
    held = FolderLock.take(open_(project).folder.root / "other.lock")
    held.path.rename(held.path.with_name("run.lock"))
    with pytest.raises(UserError, match=r"in use by process \d+ on .*rm '.*run\.lock'"):
        open_(project)


def wait(running):
    running.set()
    time.sleep(20)


def test_a_forked_child_holds_no_lock(tmp_path):
    """A worker of the loader may outlive a killed process by a moment."""
    lock = FolderLock.take(tmp_path / "run.lock")
    fork = multiprocessing.get_context("fork")
    running = fork.Event()
    child = fork.Process(target=wait, args=(running,))
    child.start()
    running.wait(20)
    lock._file.close()  # as the kernel does for a killed process
    FolderLock.take(tmp_path / "run.lock").release()
    assert child.is_alive()
    child.kill()
    child.join()


def test_a_file_system_without_locks(project, log, monkeypatch):
    """Training starts all the same; a line in the log says what is not guarded."""

    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    open_(project).close()
    assert any("no file locks" in line and "Operation not supported" in line for line in log)


def test_release_leaves_a_lock_that_is_not_ours(tmp_path):
    """Another process removed our lock and took the folder; it is theirs."""
    lock = FolderLock.take(tmp_path / "run.lock")
    lock.path.unlink()
    theirs = FolderLock.take(lock.path)
    lock.release()
    assert theirs.path.exists()


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a/b", "../a", "a\\b", "-x", "a\nb"])
def test_a_name_that_is_no_folder_is_refused(tmp_path, name):
    """The message shows the name and the rule."""
    with pytest.raises(UserError, match="name: "):
        RunPaths.for_run(DirConfig(), name, tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(project):
    """Parent missing, a file in the way, no permission; each says which path and what to do."""
    with pytest.raises(UserError, match=r"gone/experiments.*No such file or directory.*--dir.runs_dir"):
        open_(project / "gone")
    (project / "experiments").mkdir()
    (project / "experiments/digits").write_text("a file")
    with pytest.raises(UserError, match=r"digits cannot be written: .*File exists"):
        open_(project)
    (project / "experiments/digits").unlink()
    (project / "experiments").rmdir()
    (project / "experiments").write_text("a file")
    with pytest.raises(UserError, match=r"--dir.runs_dir"):
        open_(project)
    run = RunPaths.for_run(DirConfig(runs_dir="/proc"), "digits", project)
    with pytest.raises(UserError, match=r"cannot be written: .*--dir.runs_dir"):
        open_(project, folder=run)


def test_a_full_disk_is_reported(project, monkeypatch):
    """While the record is written, it is the user's business."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("common.run.folder.write_text", full)
    with pytest.raises(UserError, match=r"cannot be written: .*No space left"):
        open_(project)


def test_status_is_for_other_programs(project):
    """State, step and reason of a run, in one small file."""
    with closing(open_(project)) as run:
        assert read_status(run.folder) is None
        write_status(run.folder, "stopped", step=12, reason="SIGTERM")
        status = read_status(run.folder)
    assert status is not None
    assert (status["state"], status["step"], status["reason"]) == ("stopped", 12, "SIGTERM")
    assert not list(run.folder.root.glob(".*"))
