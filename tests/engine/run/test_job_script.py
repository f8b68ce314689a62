"""The code's version in the record of a run, and `job.sh`, which repeats the run."""

import os
import shutil
import subprocess
from contextlib import closing

import pytest

from common.run import record
from common.run.paths import DirConfig, RunPaths
from parts.job_script.around import job_script
from tests.conftest import TRAIN
from tests.parts.job_script.test_job_script import git, one_of, open_, run_job


def test_git_state_is_recorded_and_can_be_restored(project):
    """Commit, branch, and a diff that `git apply` takes; files not tracked are named."""
    git(project, "init", "-q", "-b", "main")
    (project / ".gitignore").write_text("experiments\n")
    (project / "? old").write_text("same\n" * 20)
    (project / "data.bin").write_bytes(bytes(range(256)))
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    (project / "train.py").write_text(TRAIN + "# changed ü\n")
    git(project, "mv", "? old", "n\u00e4w 1.txt")
    (project / "data.bin").write_bytes(bytes(range(255, -1, -1)))
    (project / "loose.py").write_text("")
    with closing(open_(project)) as run:
        recorded = run.record["git"]
    assert recorded["commit"] == git(project, "rev-parse", "HEAD")
    assert (recorded["branch"], recorded["dirty"], recorded["untracked"]) == ("main", True, ["loose.py"])
    git(project, "reset", "-q", "--hard")
    git(project, "apply", str(run.folder.root / "git.diff"))
    assert (project / "train.py").read_text() == TRAIN + "# changed ü\n"
    assert (project / "n\u00e4w 1.txt").exists()
    assert (project / "data.bin").read_bytes()[0] == 255


@pytest.mark.parametrize("trouble", ["no repository", "no commit", "no git", "hangs"])
def test_without_git_a_run_starts_all_the_same(project, monkeypatch, trouble):
    """The record says why there is no commit."""
    if trouble == "no commit":
        git(project, "init", "-q")
    if trouble == "no git":
        monkeypatch.setenv("PATH", str(project))
    if trouble == "hangs":
        fake = project / "git"
        fake.write_text("#!/bin/sh\nexec sleep 60\n")
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{project}:{os.environ['PATH']}")
        monkeypatch.setattr(record, "_TIMEOUT_S", 0.05)
    with closing(open_(project)) as run:
        assert run.record["git"]["commit"] is None
        expected = {"no repository": "repository", "no commit": "HEAD", "no git": "'git'", "hangs": "timed out"}
        assert expected[trouble] in run.record["git"]["note"]
        assert "rev-parse" not in run.folder.job_file.read_text()
        assert "# git: unknown (" in (run.folder.root / "git.diff").read_text()


def test_job_script_works_with_runs_outside_the_project(project, tmp_path):
    """Then the project is named by its whole path."""
    folder = RunPaths.for_run(DirConfig(runs_dir=str(tmp_path)), "far", project)
    with closing(open_(project, folder=folder)):
        done = subprocess.run(["sh", str(folder.job_file)], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (project / "called.txt").exists()


def test_job_script_is_clean(project):
    """Shellcheck has nothing to say, where it is installed."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    (project / "train.py").write_text("")
    with closing(open_(project, rank=one_of(2, per_host=1))) as run:
        subprocess.run(["shellcheck", "--shell=sh", str(run.folder.job_file)], check=True)


@pytest.mark.parametrize(("launcher", "replaced"), [("mpi", True), ("auto", False), ("none", False)])
def test_a_run_with_a_launcher_of_its_own(project, tmp_path, launcher, replaced):
    """It is repeated by the one that the script starts; a run that was to be alone, alone."""
    with closing(open_(project)) as run:
        text = job_script(run.folder.root, project, run.record, launcher=launcher)
        run.folder.job_file.write_text(text)
        called, _ = run_job(run.folder, cwd=tmp_path)
    assert ("--dist.launcher" in called) == replaced
    assert not replaced or called[called.index("--dist.launcher") + 1] == "auto"


def test_a_run_that_resumes_itself_is_repeated_each_time(project, tmp_path):
    """Not continued by the second call, unless a word says so."""
    with closing(open_(project)) as run:
        file = run.folder.config_file
        file.write_text("name: digits\nresume: auto\n")
        called, _ = run_job(run.folder, "--progress.epoch", "3", cwd=tmp_path)
        assert called[-4:] == ["--resume", "null", "--progress.epoch", "3"]
        called, _ = run_job(run.folder, "--resume", "auto", cwd=tmp_path)
        assert called[-2:] == ["--resume", "auto"] and "null" not in called
        file.write_text("name: digits\nresume: null\n")
        called, _ = run_job(run.folder, cwd=tmp_path)
        assert "--resume" not in called
