"""What a Slurm job is made of: the run's folder, a copy of the code, frozen configurations."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from common.base.errors import UserError
from common.run.record import git_state
from common.run.status import FolderLock
from tests.conftest import CONFIG, Runs
from tools.slurm import __main__ as submit
from tools.slurm import snapshot


@pytest.fixture
def prepared(tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Path, str]]:
    """prepared("--gpus", "2", words=[...]): tools.slurm for a small run below `tmp_path`; the job's folder, GPUs."""

    def call(*options: str, words: list[str] | None = None) -> tuple[Path, str]:
        assert submit.main([*options, "--", *Runs(tmp_path).words(*(words or []))]) == 0
        run, job, gpus = capsys.readouterr().out.splitlines()
        assert run == str(tmp_path / "run")
        return Path(job), gpus

    return call


def test_each_job_has_a_folder_of_its_own(prepared: Callable[..., tuple[Path, str]], tmp_path: Path) -> None:
    """The run's folder is left alone, whether it will be moved away or gone on with."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    jobs = [prepared(words=words)[0] for words in ([], ["--resume", "auto"], ["--resume", str(tmp_path / "run")])]
    assert len(set(jobs)) == 3
    for job in jobs:
        assert job.parent == tmp_path / ".jobs" / "run"
        assert sorted(path.name for path in job.iterdir()) == ["code", "config.yaml"]
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_a_queued_run_is_not_submitted_again(
    prepared: Callable[..., tuple[Path, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that is in use; the message says which job or process, and how to stop it."""
    job, _ = prepared()
    monkeypatch.setenv("QUEUE", f"16 RUNNING {tmp_path}/.jobs/run_2/a\n17 PENDING {job}\n")
    for words in ([], ["--resume", "auto"]):
        with pytest.raises(UserError, match=r"job 17, which is PENDING; .*scancel 17"):
            prepared(words=words)
    monkeypatch.setenv("QUEUE", f"16 RUNNING {tmp_path}/.jobs/run_2/a\n")
    run = tmp_path / "run"
    run.mkdir()
    lock = FolderLock.take(run / "run.lock")
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        prepared()
    lock.release()
    prepared()


def test_the_gpus_of_a_job(
    prepared: Callable[..., tuple[Path, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as asked for, else as the config says; never other than what was typed."""
    for options, words, count, ids in [
        ([], [], "0", -1),
        (["--gpus", "2"], [], "2", [0, 1]),
        ([], ["--gpu_ids", "0,1,2"], "3", [0, 1, 2]),
        ([], ["--gpu_ids", "0"], "1", [0]),
        (["--gpus", "0"], ["--config", str(tmp_path / "two.yaml")], "0", -1),
    ]:
        (tmp_path / "two.yaml").write_text(f"$BASE: {CONFIG}\ngpu_ids: [0, 1]\n")
        job, gpus = prepared(*options, words=words)
        assert gpus == count
        assert yaml.safe_load((job / "config.yaml").read_text())["gpu_ids"] == ids
    assert prepared("--gpus", "2", words=["--gpu_ids", "all"])[1] == "2"
    with pytest.raises(UserError, match=r"add --slurm\.gpus N"):
        prepared(words=["--gpu_ids", "all"])
    for asked, ids in (("4", "0,1"), ("0", "0"), ("2", "-1")):
        with pytest.raises(UserError, match=f"--slurm.gpus is {asked}; leave one of them out"):
            prepared("--gpus", asked, words=["--gpu_ids", ids])


def test_an_array_has_a_folder_and_a_config_for_each_task(
    prepared: Callable[..., tuple[Path, str]], tmp_path: Path
) -> None:
    """`%a` is the task's number, in every config word; all of them are checked at once; one copy of the code."""
    words = ["--dist.random_seed", "1%a", "--model", "{type: tests.samples.Convolution, width: %a}"]
    job, _ = prepared("--array", "2,4-8:2%2", words=words)
    expected = [name for task in (2, 4, 6, 8) for name in (f"config_{task}.yaml", f"run_{task}")]
    assert sorted(path.name for path in job.iterdir()) == sorted(["code", *expected])
    assert (job / "run_4").read_text() == str(tmp_path / "run" / "task_4")
    config = yaml.safe_load((job / "config_4.yaml").read_text())
    assert (config["dist"]["random_seed"], config["model"]["width"]) == (14, 4)
    assert (config["dir"]["runs_dir"], config["name"]) == (str(tmp_path / "run"), "task_4")
    with pytest.raises(UserError, match="width"):
        prepared("--array", "0-2", words=["--model.width", "x%a"])
    with pytest.raises(UserError, match="leave %a out of --name"):
        prepared("--array", "0-2", words=["--name", "run_%a"])


def git(project: Path, *arguments: str) -> None:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", *arguments], cwd=project, env=clean | who, check=True, capture_output=True)


@pytest.mark.parametrize("with_git", [True, False])
def test_what_is_copied(tmp_path: Path, with_git: bool) -> None:
    """All code, changes and new files too; no data, runs, caches, environments. Links lead where they led."""
    project = tmp_path / "project"
    for name in ("train.py", "custom/a.py", "new/ä b.py", "data/huge.bin", "experiments/x/y",
                 ".venv/pyvenv.cfg", ".venv/lib.py",
                 "custom/__pycache__/a.pyc", "ignored.so", "gone.py", "runs/here/z",
                 "sub/.git/x", "sub/b.py"):  # fmt: skip
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
    links = {"link.py", "inner.py", "folder", "sub/b.py"}
    expected = {"train.py", "custom/a.py", "new/ä b.py", ".snapshot.json", *links}
    expected |= {".gitignore"} if with_git else {"ignored.so"}
    found = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file() or path.is_symlink()}
    assert {name for name in found if not name.startswith("folder/")} == expected
    assert (code / "train.py").read_text() == ("changed" if with_git else "train.py")
    assert (code / "link.py").read_text() == "outside"
    assert os.readlink(code / "inner.py") == "custom/a.py"
    state = git_state(code)
    assert (state.dirty, "changed" in state.diff) == (with_git, with_git)
