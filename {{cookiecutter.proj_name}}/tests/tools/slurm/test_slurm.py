"""Slurm without Slurm: stand-ins on the PATH record how they are called. On a real one: the template's own tests."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.run.paths import RunPaths
from common.run.status import write_status
from tests.conftest import ENVIRONMENT, PROJECT, SMALL, copy_of_project, load, same
from tests.tools.slurm.conftest import calls_of

SHELL = shutil.which("dash") or "sh"


# Stands in for Python in the tests of the shell script alone: it answers like tools.slurm.
PYTHON = """#!/bin/sh
[ "$2" = tools.slurm ] || exec "$REAL_PYTHON" "$@"
printf '%s\\n' "$@" >"$SUBMIT_WORDS"
mkdir -p "$RUN.job"
printf '%s\\n' "$RUN" "$RUN.job" "${GPUS:-0}"
"""
Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def script(tmp_path: Path, cluster: Path) -> Script:
    """script("--slurm.nodes", "2", GPUS="4"): slurm.sh alone, for a run that lies in `tmp_path / RUN`."""
    python = tmp_path / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    own = {
        "PYTHON": str(python), "RUN": str(tmp_path / "run"), "SUBMIT_WORDS": str(tmp_path / "words"),
        "REAL_PYTHON": sys.executable,
    }  # fmt: skip

    def call(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **own, **variables}
        command = [SHELL, str(PROJECT / "scripts" / "slurm.sh"), *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")

    return call


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of this project, to be edited; in a folder whose name a careless script trips over."""
    return copy_of_project(tmp_path / 'it\'s a "project" $HOME')


def submit_in(project: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """slurm.sh of a project as a user types it, with a small run."""
    small = [word for pair in SMALL.items() if pair[0] not in words for word in pair]
    environment = {**ENVIRONMENT, "PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHONPATH": "", **variables}
    command = [SHELL, str(project / "scripts" / "slurm.sh"), *small, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=120)


def run_job(file: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return a job file as Slurm would run it."""
    own = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "0"}
    environment = {**ENVIRONMENT, "PATH": os.environ["PATH"], "PYTHONPATH": "", **own, **variables}
    return subprocess.run([SHELL, str(file)], capture_output=True, text=True, env=environment, cwd="/", timeout=120)


def job_of(run: Path) -> Path:
    """Return the folder of the only job of a run or array."""
    (job,) = (run.parent / ".jobs" / run.name).iterdir()
    return job


def directives(text: str) -> dict[str, str]:
    """Return the #SBATCH lines of a job file."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, flags=re.MULTILINE))


def test_the_job_file_of_a_dry_run(script: Script, tmp_path: Path, cluster: Path) -> None:
    """What the job asks of Slurm, by default; nothing is queued and no file appears."""
    done = script("--dry-run", "--name", "a b")
    assert done.returncode == 0, done.stderr
    asked = directives(done.stdout)
    expected = {
        "job-name": '"run"', "output": "%j.out", "open-mode": "append", "requeue": "", "signal": "USR1@120",
        "nodes": "1", "ntasks-per-node": "1", "cpus-per-task": "1", "time": '"2:00:00"',
        "chdir": f'"{tmp_path}/run.job"',
    }  # fmt: skip
    assert asked == expected
    assert "export OMP_NUM_THREADS=1 " in done.stdout
    assert "--kill-on-bad-exit=1" in done.stdout
    assert (tmp_path / "words").read_text().splitlines() == ["-m", "tools.slurm", "--dry-run", "--", "--name", "a b"]
    assert list((tmp_path / "run.job").iterdir()) == []
    assert cluster.read_text() == ""


def test_options_go_before_variables_and_these_before_the_defaults(script: Script, tmp_path: Path) -> None:
    """Each setting has an option and an environment variable; config words are passed on untouched."""
    variables = {"TRAIN_PARTITION": "old", "TRAIN_CPUS": "8", "TRAIN_ACCOUNT": "phys", "TRAIN_TIME": "1-12"}
    options = ["--slurm.partition", "gpu", "--slurm.nodes=2", "--slurm.mem", "32G", "--slurm.qos", "low prio"]
    words = ["--optim.lr=1e-3", "--loss", "{a: 'b c', $REPLACE: true}", "--slurm.signal_seconds", "300", "--name", "*"]
    done = script(*options, *words, "--dry-run", **variables)
    asked = directives(done.stdout)
    found = [asked[name] for name in ("partition", "nodes", "mem", "qos", "cpus-per-task", "account", "time", "signal")]
    assert found == ['"gpu"', "2", '"32G"', '"low prio"', "8", '"phys"', '"1-12"', "USR1@300"]
    passed = (tmp_path / "words").read_text().splitlines()
    assert passed[passed.index("--") + 1 :] == [
        "--optim.lr=1e-3",
        "--loss",
        "{a: 'b c', $REPLACE: true}",
        "--name",
        "*",
    ]


@pytest.mark.slow
def test_a_submitted_job_trains_what_was_submitted(project: Path, cluster: Path) -> None:
    """Code, config and paths are those of the moment of submission, with any character in them."""
    words = ["--name", "a 'b' \"c\" $HOME", "--loss", "{ce: {type: tests.samples.CrossEntropy, label_smoothing: 0.25}}"]
    (project / "configs" / "mine.yaml").write_text("$BASE: default.yaml\nmodel: {width: 4, dropout: 0.25}\n")
    done = submit_in(project, "--config", "configs/mine.yaml", *words)
    assert done.returncode == 0, done.stderr
    (project / "configs" / "mine.yaml").write_text("broken: [")
    (project / "custom" / "models" / "conv_model.py").write_text("raise RuntimeError('edited')\n")
    run = project / "experiments" / "a 'b' \"c\" $HOME"
    done = run_job(job_of(run) / "job.sh")
    assert done.returncode == 0, done.stderr
    state = load(run)
    assert state["position"]["step"] == 10
    config = state["about"]["config"]
    assert (config["model"]["dropout"], config["loss"]["ce"]["label_smoothing"]) == (0.25, 0.25)
    assert config["dir"] == {"runs_dir": str(run.parent), "data_dir": str(project / "data"), "eval_dir": None}
    assert calls_of(cluster, "scontrol") == []
    assert sorted(path.name for path in (project / "experiments").iterdir()) == [".jobs", run.name]
    # Queued again, though it has finished: it does not train.
    done = run_job(job_of(run) / "job.sh", SLURM_RESTART_COUNT="1")
    assert done.returncode == 0
    assert "finished at step 10" in done.stderr
    assert len(calls_of(cluster, "srun")) == 1


@pytest.mark.slow
def test_a_mistake_in_the_config_is_reported_at_once(project: Path, cluster: Path) -> None:
    """On the machine where one types, not hours later; nothing is moved, copied or queued."""
    done = submit_in(project, "--optim.lrr", "0.1")
    assert done.returncode == 2
    assert "did you mean optim.lr" in done.stderr
    assert not (project / "experiments").exists()
    assert cluster.read_text() == ""


@pytest.mark.slow
def test_tasks_of_an_array_train_apart(project: Path, cluster: Path) -> None:
    """Each has its own folder, status and way back into the queue; a wrong one does not touch the others."""
    words = ["--slurm.array", "0-1", "--dist.random_seed", "%a", "--progress.epoch", "1"]
    done = submit_in(project, *words)
    assert done.returncode == 0, done.stderr
    base = project / "experiments" / "default"
    text = (job_of(base) / "job.sh").read_text()
    assert (directives(text)["array"], directives(text)["output"]) == ('"0-1"', "%A_%a.out")
    for task in ("0", "1"):
        run_job(job_of(base) / "job.sh", SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID=task)
    states = [load(base / f"task_{task}") for task in (0, 1)]
    assert [state["about"]["seed"] for state in states] == [0, 1]
    assert not same(states[0]["model"], states[1]["model"])
    write_status(RunPaths(base / "task_0"), "running", step=None)
    os.utime(base / "task_0" / "status.json", (1, 1))
    done = run_job(job_of(base) / "job.sh", SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="0", SRUN_CODE="138")
    assert (done.returncode, calls_of(cluster, "scontrol")) == (75, ["requeue 17_0"])


@pytest.mark.slow
def test_a_job_continues_its_own_run(project: Path, cluster: Path) -> None:
    """When it starts again, though its config does not say so; a new job does with --resume auto."""
    run = project / "experiments" / "default"
    assert submit_in(project).returncode == 0
    assert run_job(job_of(run) / "job.sh").returncode == 0
    write_status(RunPaths(run), "stopped", step=10, reason="SIGUSR1")
    assert run_job(job_of(run) / "job.sh", SLURM_RESTART_COUNT="1").returncode == 0
    assert "resumed at step 10" in (run / "train.log").read_text()
    shutil.rmtree(job_of(run))
    assert submit_in(project, "--resume", "auto", "--progress.epoch", "3").returncode == 0
    assert run_job(job_of(run) / "job.sh", SLURM_JOB_ID="18").returncode == 0
    assert load(run)["position"]["step"] == 15
    assert not list(run.parent.glob("default_*"))
