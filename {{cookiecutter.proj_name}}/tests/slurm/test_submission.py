"""What a Slurm job is made of: the run's folder, a copy of the code, frozen configurations."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from common.base.errors import UserError
from common.run.folder import archive
from common.run.git import GitState
from common.run.lock import FolderLock
from common.run.paths import RunPaths
from common.slurm import snapshot, submission
from tests.conftest import CONFIG, Runs
from custom import submit


@pytest.fixture
def prepared(tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """prepared("--gpus", "2", words=[...]): custom.submit for a small run below `tmp_path`; the lines it prints."""

    def call(*options: str, words: list[str] | None = None) -> list[str]:
        assert submit.main([*options, "--", *Runs(tmp_path).words(*(words or []))]) == 0
        return capsys.readouterr().out.splitlines()

    return call


def test_an_earlier_run_is_moved_away_or_gone_on_with(prepared: Callable[..., list[str]], tmp_path: Path) -> None:
    """CT-08, R-46: as train.py does it; with --resume the folder stays, with the new code beside the old."""
    run = tmp_path / "run"
    assert prepared() == [str(run), "", "0"]
    (run / "slurm" / "jobs").write_text("17\n")
    (run / "notes.txt").write_text("mine")
    *said, last = prepared()
    (moved,) = tmp_path.glob("run_*")
    assert (said, last) == ([str(run), "", "0"], str(moved))
    assert (moved / "notes.txt").read_text() == "mine"
    assert prepared(words=["--resume", "auto"]) == [str(run), "-2", "0"]
    assert prepared(words=["--resume", str(run)]) == [str(run), "-3", "0"]
    assert sorted(path.name for path in run.iterdir()) == ["code", "code_1", "code_2", "slurm"]
    assert sorted(path.name for path in (run / "slurm").iterdir()) == ["config-2.yaml", "config-3.yaml", "config.yaml"]
    assert len(list(tmp_path.glob("run*"))) == 2


def test_what_never_came_to_a_job_is_replaced(prepared: Callable[..., list[str]], tmp_path: Path) -> None:
    """CT-08: sbatch refused the job; trying again leaves no heap of folders."""
    prepared()
    prepared()
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]


def test_a_queued_run_is_not_submitted_again(
    prepared: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CT-08, R-46: nor one that is in use; the message says which job or process, and how to stop it."""
    prepared()
    (tmp_path / "run" / "slurm" / "jobs").write_text("16\n17\n")
    monkeypatch.setenv("QUEUE", "PENDING\nPENDING\nRUNNING\n")
    for words in ([], ["--resume", "auto"]):
        with pytest.raises(UserError, match=r"job 17, which is PENDING and RUNNING; .*scancel 17"):
            prepared(words=words)
    monkeypatch.setenv("QUEUE", "")
    monkeypatch.setenv("QUEUE_ERROR", "slurm_load_jobs error: Unable to contact slurm controller")
    with pytest.raises(UserError, match=r"squeue failed.*Unable to contact"):
        prepared()
    monkeypatch.setenv("QUEUE_ERROR", "slurm_load_jobs error: Invalid job id specified")
    lock = FolderLock.take(tmp_path / "run" / "run.lock")
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        prepared()
    lock.release()
    prepared()


def test_the_lock_of_a_job_that_was_killed(prepared: Callable[..., list[str]], tmp_path: Path) -> None:
    """CT-08: the file is left, but nothing holds it."""
    prepared()
    lock = tmp_path / "run" / "run.lock"
    lock.write_text("process 1 on node17")
    prepared(words=["--resume", "auto"])
    assert not lock.exists()


def test_the_gpus_of_a_job(prepared: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-64, CT-13: as many as asked for, else as the config says; never other than what was typed."""
    frozen = lambda: yaml.safe_load((tmp_path / "run/slurm/config.yaml").read_text())["gpu_ids"]  # noqa: E731
    for options, words, count, ids in [
        ([], [], "0", -1),
        (["--gpus", "2"], [], "2", [0, 1]),
        ([], ["--gpu_ids", "0,1,2"], "3", [0, 1, 2]),
        ([], ["--gpu_ids", "0"], "1", [0]),
        (["--gpus", "0"], ["--config", str(tmp_path / "two.yaml")], "0", -1),
    ]:
        (tmp_path / "two.yaml").write_text(f"$BASE: {CONFIG}\ngpu_ids: [0, 1]\n")
        assert prepared(*options, words=words)[2] == count
        assert frozen() == ids
    assert prepared("--gpus", "2", words=["--gpu_ids", "all"])[2] == "2"
    with pytest.raises(UserError, match=r"add --slurm\.gpus N"):
        prepared(words=["--gpu_ids", "all"])
    for asked, ids in (("4", "0,1"), ("0", "0"), ("2", "-1")):
        with pytest.raises(UserError, match=f"--slurm.gpus is {asked}; leave one of them out"):
            prepared("--gpus", asked, words=["--gpu_ids", ids])


def test_an_array_has_a_folder_and_a_config_for_each_task(prepared: Callable[..., list[str]], tmp_path: Path) -> None:
    """R-46: `%a` is the task's number, in every config word; all of them are checked at once; one copy of the code."""
    words = ["--dist.random_seed", "1%a", "--model", "{type: ConvModel, width: %a}"]
    assert prepared("--array", "2,4-8:2%2", words=words) == [str(tmp_path / "run"), "", "0"]
    files = sorted((tmp_path / "run" / "slurm").iterdir())
    assert [file.name for file in files] == ["config_2.yaml", "config_4.yaml", "config_6.yaml", "config_8.yaml"]
    config = yaml.safe_load(files[1].read_text())
    assert (config["dist"]["random_seed"], config["model"]["width"]) == (14, 4)
    assert (config["dir"]["expr_dir"], config["name"]) == (str(tmp_path / "run"), "task_4")
    with pytest.raises(UserError, match="width"):
        prepared("--array", "0-2", words=["--model.width", "x%a"])
    with pytest.raises(UserError, match="leave %a out of it"):
        prepared("--array", "0-2", words=["--name", "run_%a"])


@pytest.mark.parametrize("text", ["", "a", "4-2", "1-", "1,,2", "0-4%", "-1", "0-4:0"])
def test_a_list_of_tasks_that_is_none(text: str) -> None:
    """R-46: refused with the forms that there are."""
    with pytest.raises(UserError, match=r"--slurm.array: .*0-99%4"):
        submission.array_tasks(text)


def test_only_its_own_job_keeps_a_folder(tmp_path: Path) -> None:
    """CT-08: an ordinary start moves the whole folder; so does one of a copy of the code that lies elsewhere."""
    for place, stays in (("run/code", True), ("code", True), ("other/code", False), (None, False)):
        base = tmp_path / str(stays) / str(place).replace("/", "-")
        folder = RunPaths(base / "run")
        for name in ("code", "slurm", "checkpoints"):
            (folder.root / name).mkdir(parents=True)
        if place is not None:
            (base / place).mkdir(parents=True, exist_ok=True)
            (base / place / ".snapshot.json").write_text("{}")
        archive(folder, running=None if place is None else base / place)
        assert (folder.root / "slurm").exists() == (folder.root / "code").exists() == stays
        assert not (folder.root / "checkpoints").exists()


def git(project: Path, *arguments: str) -> None:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", *arguments], cwd=project, env=clean | who, check=True, capture_output=True)


@pytest.mark.parametrize("with_git", [True, False])
def test_what_is_copied(tmp_path: Path, with_git: bool) -> None:
    """R-48: all code, changes and new files too; no data, runs, caches, environments. Links lead where they led."""
    project = tmp_path / "project"
    for name in ("train.py", "custom/a.py", "new/ä b.py", "data/huge.bin", "experiments/x/y", ".venv/pyvenv.cfg",
                 ".venv/lib.py", "custom/__pycache__/a.pyc", "ignored.so", "gone.py", "runs/here/z"):  # fmt: skip
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    (tmp_path / "outside.py").write_text("outside")
    (project / "link.py").symlink_to("../outside.py")
    (project / "inner.py").symlink_to("custom/a.py")
    (project / "folder").symlink_to("custom")
    if with_git:
        (project / ".gitignore").write_text("data/*\nexperiments/\n.venv\n__pycache__\n*.so\n")
        git(project, "init", "-q")
        git(project, "add", "train.py", "custom", "gone.py", ".gitignore")
        git(project, "commit", "-qm", "first")
        (project / "train.py").write_text("changed")
    (project / "gone.py").unlink()
    code = project / "runs" / "here" / "code"
    snapshot.snapshot(project, code, [project / "runs", project / "data", project / "experiments"])
    links = {"link.py", "inner.py", "folder"}
    expected = {"train.py", "custom/a.py", "new/ä b.py", ".snapshot.json", *links}
    expected |= {".gitignore"} if with_git else {"ignored.so"}
    found = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file() or path.is_symlink()}
    assert {name for name in found if not name.startswith("folder/")} == expected
    assert (code / "train.py").read_text() == ("changed" if with_git else "train.py")
    assert (code / "link.py").read_text() == "outside"
    assert os.readlink(code / "inner.py") == "custom/a.py"
    state = GitState.from_json((code / ".snapshot.json").read_text())
    assert (state.dirty, b"changed" in state.diff) == (with_git, with_git)


def test_code_that_git_ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-48: what has been imported is needed, such as a compiled extension; not what lies in an environment."""
    for name in ("train.py", "custom/ops.so", "dist/part.py", ".venv/pyvenv.cfg", ".venv/lib/torch.py", "other.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("*.so\ndist/\n.venv\n")
    git(tmp_path, "init", "-q")
    for name in ("custom/ops.so", "dist/part.py", ".venv/lib/torch.py"):
        module = ModuleType(name)
        module.__file__ = str(tmp_path / name)
        monkeypatch.setitem(sys.modules, name, module)
    names = {path.as_posix() for path in snapshot.code_files(tmp_path, [])}
    assert names == {".gitignore", "train.py", "custom/ops.so", "dist/part.py"}


def test_too_much_for_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-48: data beside the code would be copied with each job; the message names the largest files."""
    monkeypatch.setattr(snapshot, "MAX_SNAPSHOT_MB", 1)
    (tmp_path / "train.py").touch()
    (tmp_path / "video.bin").write_bytes(bytes(2**21))
    with pytest.raises(UserError, match=r"video.bin \(2 MB\).*\.gitignore"):
        snapshot.snapshot(tmp_path, tmp_path / "experiments" / "code", [])
    assert not (tmp_path / "experiments").exists()


def test_too_much_code_moves_no_earlier_run(
    prepared: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CT-08: found when the copy is made; the earlier run has its folder again."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    monkeypatch.setattr(snapshot, "MAX_SNAPSHOT_MB", 0)
    with pytest.raises(UserError, match="the limit is 0 MB"):
        prepared()
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_paths_in_a_config_keep_their_meaning(tmp_path: Path) -> None:
    """R-46: what is not copied with the code is named by its whole path."""
    for name in ("train.py", "custom/labels.txt", "data/list.txt", "experiments/old/checkpoints/best.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    values = {
        "name": "x", "resume": "experiments/old/", "gpu_ids": -1, "dist": {"processes": 2},
        "dir": {"expr_dir": "runs", "data_dir": None, "eval_dir": "out"},
        "init_from": {"path": "./experiments/old/checkpoints/best.pt"},
        "dataset": {"train": {"files": ["data/list.txt", "custom/labels.txt", "a/b"], "number": 3}},
    }  # fmt: skip
    found = submission.frozen(values, RunPaths(tmp_path / "runs" / "x"), tmp_path, 0, None)
    assert found["dataset"]["train"]["files"] == [f"{tmp_path}/data/list.txt", "custom/labels.txt", "a/b"]
    assert found["init_from"]["path"] == f"{tmp_path}/experiments/old/checkpoints/best.pt"
    assert found["resume"] == f"{tmp_path}/experiments/old"
    assert found["dir"] == {
        "expr_dir": f"{tmp_path}/runs", "data_dir": f"{tmp_path}/data", "eval_dir": f"{tmp_path}/out"
    }  # fmt: skip
    assert values["resume"] == "experiments/old/"


def test_a_new_run_from_the_weights_of_its_own_folder(prepared: Callable[..., list[str]], tmp_path: Path) -> None:
    """CT-51: the folder would be moved away, with the weights in it, before the job begins."""
    prepared()
    with pytest.raises(UserError, match="another --name"):
        prepared(words=["--resume", "auto", "--progress.start_epoch", "0"])
    best = tmp_path / "run" / "checkpoints" / "best.pt"
    best.parent.mkdir()
    best.touch()
    with pytest.raises(UserError, match=r"init_from.path: .*best.pt .*another --name"):
        prepared(words=["--init_from.path", str(best)])
    assert best.exists()
