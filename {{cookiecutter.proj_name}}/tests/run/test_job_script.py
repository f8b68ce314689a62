"""The code's version in the record of a run, and `job.sh`, which repeats the run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from common.distributed import Rank
from common.run import git as run_git
from common.run.folder import OpenRun, open_run
from common.run.paths import DirConfig, RunPaths
from cli.job_script import job_script
from tests.conftest import TRAIN


def open_(project: Path, name: str = "digits", **changes) -> OpenRun:
    options = {"resume": False, "resolved_values": {"name": name}, "argv": ["train.py"], "seed": 7, "rank": Rank()}
    run = open_run(RunPaths.for_run(DirConfig(), name, project), project=project, **{**options, **changes})
    run.folder.job_file.write_text(job_script(run.folder.root, project, run.record))
    return run


def one_of(world: int, per_host: int) -> Rank:
    return Rank(world_size=world, launcher="torchrun", local_world=per_host)


def git(project: Path, *arguments: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", *arguments], cwd=project, env=clean | who, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def run_job(run: RunPaths, *arguments: str, cwd: Path) -> tuple[list[str], str]:
    """What train.py was called with, and what was said on stderr."""
    done = subprocess.run(
        ["sh", str(run.job_file), *arguments],
        cwd=cwd,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    called = (run.root.parents[1] / "called.txt").read_text().splitlines()
    return called, done.stderr


def test_git_state_is_recorded_and_can_be_restored(project):
    """CT-09, XP-03, R-48: commit, branch, and a diff that `git apply` takes; files not tracked are named."""
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
    with open_(project) as run:
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
    """CT-09: the record says why there is no commit."""
    if trouble == "no commit":
        git(project, "init", "-q")
    if trouble == "no git":
        monkeypatch.setenv("PATH", str(project))
    if trouble == "hangs":
        fake = project / "git"
        fake.write_text("#!/bin/sh\nexec sleep 60\n")
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{project}:{os.environ['PATH']}")
        monkeypatch.setattr(run_git, "_TIMEOUT_S", 0.05)
    with open_(project) as run:
        assert run.record["git"]["commit"] is None
        expected = {"no repository": "repository", "no commit": "HEAD", "no git": "'git'", "hangs": "timed out"}
        assert expected[trouble] in run.record["git"]["note"]
        assert "rev-parse" not in run.folder.job_file.read_text()
        patch = (run.folder.root / "git.diff").read_text()
        assert ("no git repository (git init creates one)" in patch) == (trouble == "no repository")


def test_job_script_repeats_the_run_from_anywhere(project, tmp_path):
    """CT-10, D-31, R-48: from another folder, under another name, with the run's own config and seed."""
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    with open_(project, name='it\'s "1"', seed=11) as run:
        called, said = run_job(run.folder, "--progress.epoch", "a b", cwd=elsewhere)
    config = called[called.index("--config") + 1]
    assert Path(config).samefile(run.folder.config_file)
    assert called[0] == "train.py"
    assert called[-6:] == ["--name", 'it\'s "1"_replicate', "--dist.random_seed", "11", "--progress.epoch", "a b"]
    assert said == ""


def test_job_script_follows_when_run_or_project_move(project, tmp_path):
    """CT-10, BS-07: an archived run is repeated with its own config, not with that of the run that took its name."""
    open_(project).release()
    open_(project).release()
    moved = tmp_path / "moved"
    project.rename(moved)
    (archived,) = (moved / "experiments").glob("digits_*")
    called, _ = run_job(RunPaths(archived), cwd=tmp_path)
    assert Path(called[called.index("--config") + 1]).samefile(archived / "config.yaml")


def test_job_script_works_with_runs_outside_the_project(project, tmp_path):
    """CT-10: then the project is named by its whole path."""
    folder = RunPaths.for_run(DirConfig(runs_dir=str(tmp_path)), "far", project)
    options = {"resume": False, "resolved_values": {}, "argv": ["train.py"], "seed": 0, "rank": Rank()}
    with open_run(folder, project=project, **options) as run:
        folder.job_file.write_text(job_script(folder.root, project, run.record))
        done = subprocess.run(["sh", str(folder.job_file)], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (project / "called.txt").exists()


def test_job_script_keeps_the_launcher(project, monkeypatch):
    """CT-10, R-48, D-31: as many processes as there were, and the variables that change results."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "canary-4711")
    other = project / "train two.py"
    other.write_text(TRAIN)
    with open_(project, argv=[str(other)], rank=one_of(4, per_host=4)) as run:
        script = run.folder.job_file.read_text()
    assert "-m torch.distributed.run --nproc-per-node=4 --standalone 'train two.py'" in script
    assert '"${OMP_NUM_THREADS:=3}"' in script and "canary" not in script
    subprocess.run(["sh", "-n", str(run.folder.job_file)], check=True)


def test_job_script_is_clean(project):
    """CT-10: shellcheck has nothing to say, where it is installed."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    (project / "train.py").write_text("")
    with open_(project, rank=one_of(2, per_host=1)) as run:
        subprocess.run(["shellcheck", "--shell=sh", str(run.folder.job_file)], check=True)


def test_job_script_warns_when_the_code_is_another(project, tmp_path):
    """CT-10, R-48: the recorded commit and the present one are both named."""
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    with open_(project) as run:
        _, said = run_job(run.folder, cwd=tmp_path)
        assert said == ""
        git(project, "commit", "-qm", "second", "--allow-empty")
        _, said = run_job(run.folder, cwd=tmp_path)
    assert git(project, "rev-parse", "HEAD~") in said
    assert git(project, "rev-parse", "HEAD") in said
