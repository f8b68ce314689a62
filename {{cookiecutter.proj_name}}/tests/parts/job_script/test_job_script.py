"""The code's version in the record of a run, and `job.sh`, which repeats the run."""

import os
import subprocess
from contextlib import closing
from pathlib import Path

from common.distributed import Rank
from common.run.folder import OpenRun, open_run
from common.run.paths import DirConfig, RunPaths
from common.run.record import describe_start
from parts.job_script.around import job_script
from tests.conftest import TRAIN, Runs


def open_(project: Path, name: str = "digits", folder: RunPaths | None = None, **changes) -> OpenRun:
    folder = folder or RunPaths.for_run(DirConfig(), name, project)
    attempt, patch = describe_start(project, **{"argv": ["train.py"], "seed": 7, "rank": Rank(), **changes})
    run = open_run(folder, {"name": name}, attempt, patch, resume=False)
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
    """Return what train.py was called with, and what was said on stderr."""
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


def test_job_script_repeats_the_run_from_anywhere(project, tmp_path):
    """From another folder, under another name, with the run's own config and seed."""
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    with closing(open_(project, name='it\'s "1"', seed=11)) as run:
        called, said = run_job(run.folder, "--progress.epoch", "a b", cwd=elsewhere)
    config = called[called.index("--config") + 1]
    assert Path(config).samefile(run.folder.config_file)
    assert called[0] == "train.py"
    assert called[-6:] == ["--name", 'it\'s "1"_replicate', "--dist.random_seed", "11", "--progress.epoch", "a b"]
    assert said == ""


def test_job_script_follows_when_run_or_project_move(project, tmp_path):
    """An archived run is repeated with its own config, not with that of the run that took its name."""
    open_(project).close()
    open_(project).close()
    moved = tmp_path / "moved"
    project.rename(moved)
    (archived,) = (moved / "experiments").glob("digits_*")
    called, _ = run_job(RunPaths(archived), cwd=tmp_path)
    assert Path(called[called.index("--config") + 1]).samefile(archived / "config.yaml")


def test_job_script_keeps_the_launcher(project, monkeypatch):
    """As many processes as there were, and the variables that change results."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "canary-4711")
    other = project / "train two.py"
    other.write_text(TRAIN)
    with closing(open_(project, argv=[str(other)], rank=one_of(4, per_host=4))) as run:
        script = run.folder.job_file.read_text()
    assert "-m torch.distributed.run --nproc-per-node=4 --standalone 'train two.py'" in script
    assert '"${OMP_NUM_THREADS:=3}"' in script and "canary" not in script
    subprocess.run(["sh", "-n", str(run.folder.job_file)], check=True)


def test_job_script_warns_when_the_code_is_another(project, tmp_path):
    """The recorded commit and the present one are both named."""
    git(project, "init", "-q")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    with closing(open_(project)) as run:
        _, said = run_job(run.folder, cwd=tmp_path)
        assert said == ""
        git(project, "commit", "-qm", "second", "--allow-empty")
        _, said = run_job(run.folder, cwd=tmp_path)
    assert git(project, "rev-parse", "HEAD~") in said
    assert git(project, "rev-parse", "HEAD") in said


def test_a_resume_leaves_it(runs: Runs) -> None:
    """It repeats the run as it was started."""
    folder = runs.train("--progress.epoch", "1")
    script = (folder / "job.sh").read_bytes()
    runs.train("--progress.epoch", "2", "--resume", "auto")
    assert (folder / "job.sh").read_bytes() == script
