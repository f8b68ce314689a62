"""Slurm without Slurm: stand-ins on the PATH record how they are called. On a real one: the template's own tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.run.paths import RunPaths
from common.run.status import write_status
from tests.conftest import PROJECT, copy_of_project, load
from tests.tools.slurm.conftest import calls_of
from tests.tools.slurm.test_slurm import PYTHON, SHELL, Script, directives, job_of, run_job, submit_in


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


def test_what_modules_print(script: Script, tmp_path: Path) -> None:
    """While they are imported it is not taken for a folder; after the answer, nothing is submitted or removed."""
    (tmp_path / "run").mkdir()
    python = tmp_path / "bin" / "python"
    usual = python.read_text()
    first, _, rest = usual.partition("\n")
    python.write_text(f"{first}\necho models loaded\n{rest}")
    done = script("--dry-run")
    assert done.returncode == 0 and directives(done.stdout)["job-name"] == '"run"'
    python.write_text(f"{first}\ntrap 'echo bye' EXIT\n{rest}")
    done = script()
    assert done.returncode == 2 and "must print the folders" in done.stderr and (tmp_path / "run").is_dir()


def test_an_array_by_environment(script: Script, tmp_path: Path) -> None:
    """TRAIN_ARRAY is the option's default like the other variables; an empty option is no array."""
    done = script("--dry-run", TRAIN_ARRAY="0-4%2")
    assert directives(done.stdout)["array"] == '"0-4%2"', done.stderr
    assert (tmp_path / "words").read_text().splitlines()[-4:] == ["--dry-run", "--array", "0-4%2", "--"]
    assert directives(script("--slurm.array", "7", "--dry-run", TRAIN_ARRAY="0-4").stdout)["array"] == '"7"'
    assert "array" not in directives(script("--slurm.array=", "--dry-run", TRAIN_ARRAY="0-4").stdout)
    assert "0-4: job 5 is one allocation" in script(TRAIN_ARRAY="0-4", SLURM_JOB_ID="5").stderr


def test_one_process_for_each_gpu(script: Script) -> None:
    """As many processes as GPUs on each node; another number is a contradiction."""
    done = script("--slurm.nodes", "2", "--slurm.gpus", "4", "--slurm.cpus", "6", "--dry-run", GPUS="4")
    asked = directives(done.stdout)
    assert (asked["gpus-per-node"], asked["ntasks-per-node"], asked["cpus-per-task"]) == ("4", "4", "6")
    assert "srun --nodes=2 --ntasks-per-node=4 --cpus-per-task=6 --gpus-per-node=4 " in done.stdout
    done = script("--slurm.gpus", "4", "--slurm.tasks", "2", "--dry-run", GPUS="4")
    assert done.returncode == 2
    assert "--slurm.tasks 2: there is one process for each of the 4 GPUs" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slurm.partion", "x"], "--slurm.partion: there is no such option"),
        (["--slurm.nodes", "two"], "--slurm.nodes two: must be an integer"),
        (["--slurm.cpus="], "--slurm.cpus : must be an integer"),
        (["--slurm.time"], "--slurm.time: needs a value"),
        (["--slurm.account", "a\n#SBATCH --x"], "--slurm.account: the value has a line break"),
    ],
)
def test_mistakes_in_options(script: Script, cluster: Path, words: list[str], message: str) -> None:
    """Refused with the option's name, before anything is queued."""
    done = script(*words)
    assert (done.returncode, cluster.read_text()) == (2, "")
    assert message in done.stderr


def test_what_is_said_after_submission(script: Script, tmp_path: Path, cluster: Path) -> None:
    """The job, where its run and its log are, how to watch it and how to stop it."""
    done = script("--slurm.nodes", "2", SBATCH_SAYS="88;elsewhere")  # a cluster's name follows on some sites
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    for text in ("job 88 is queued", f"run folder  {run}\n", f"{run}.job/88.out", "squeue -j 88", "scancel 88"):
        assert text in done.stdout
    assert calls_of(cluster, "sbatch") == [f"--parsable {run}.job/job.sh"]
    subprocess.run([SHELL, "-n", f"{run}.job/job.sh"], check=True)


def test_without_slurm_it_says_what_to_do(script: Script, tmp_path: Path) -> None:
    """No sbatch: an error with a way out. A dry run needs none."""
    path = "/usr/bin:/bin"
    if shutil.which("sbatch", path=path):  # a machine with Slurm: only what the script needs is on the PATH
        path = str(tmp_path / "few")
        Path(path).mkdir()
        for name in ("dirname", "sed", "cat", "mkdir", "sh", "tail"):
            Path(path, name).symlink_to(str(shutil.which(name)))
    done = script("--name", "x", PATH=path)
    assert done.returncode == 2
    assert "no sbatch on the PATH" in done.stderr
    assert "scripts/cpu.sh" in done.stderr
    assert script("--name", "x", "--dry-run", PATH=path).returncode == 0


def test_a_refused_job_is_an_error(script: Script, tmp_path: Path) -> None:
    """What sbatch says is shown, and nothing counts as queued."""
    done = script(SBATCH_CODE="1", SBATCH_SAYS="")
    assert done.returncode == 2
    assert "nothing was queued" in done.stderr
    assert not (tmp_path / "run.job").exists()


def test_help_and_the_shell_checker(script: Script, tmp_path: Path) -> None:
    """--help lists every option that is understood; shellcheck is content with the script and with its jobs."""
    text = (PROJECT / "scripts" / "slurm.sh").read_text()
    understood = set(re.findall(r"(--slurm\.\w+)\)? ", text))
    assert len(understood) >= 11
    assert all(option in script("--help").stdout for option in understood)
    assert script("--slurm.array", "0-3", RUN=f'{tmp_path}/it\'s "1"').returncode == 0
    checker = Path(sys.executable).with_name("shellcheck")
    found = str(checker) if checker.is_file() else shutil.which("shellcheck")
    job = tmp_path / 'it\'s "1".job' / "job.sh"
    subprocess.run([SHELL, "-n", str(job)], check=True)
    if found is not None:  # a development tool, which a user may be without
        subprocess.run([found, str(PROJECT / "scripts" / "slurm.sh"), str(job)], check=True)


def test_inside_an_allocation_it_starts_at_once(script: Script, tmp_path: Path, cluster: Path) -> None:
    """By srun, with the same processes; the exit code is that of the training."""
    done = script("--slurm.nodes", "2", "--slurm.tasks", "3", SLURM_JOB_ID="5", SRUN_CODE="143")
    assert done.returncode == 143
    (called,) = calls_of(cluster, "srun")
    assert called.startswith("--nodes=2 --ntasks-per-node=3 --cpus-per-task=1 --kill-on-bad-exit=1")
    assert called.endswith(f"{tmp_path}/run.job/code/train.py --config {tmp_path}/run.job/config.yaml")
    assert calls_of(cluster, "sbatch") == calls_of(cluster, "scontrol") == []
    assert "one allocation" in script("--slurm.array", "0-1", SLURM_JOB_ID="5").stderr


@pytest.mark.slow
def test_a_dry_run_leaves_nothing(project: Path, cluster: Path) -> None:
    """With the real preparation: the job file as it would be queued, and no file or folder of it."""
    before = sorted(project.rglob("*"))
    done = submit_in(project, "--name", "dry", "--slurm.nodes", "2", "--slurm.tasks", "3", "--dry-run")
    assert done.returncode == 0, done.stderr
    asked = directives(done.stdout)
    assert (asked["job-name"], asked["nodes"], asked["ntasks-per-node"]) == ('"dry"', "2", "3")
    assert "/experiments/.jobs/dry/" in asked["chdir"]
    assert subprocess.run([SHELL, "-n"], input=done.stdout, text=True, check=False).returncode == 0
    assert sorted(project.rglob("*")) == before
    assert cluster.read_text() == ""


@pytest.mark.slow
def test_a_refused_job_moves_no_earlier_run(project: Path, cluster: Path) -> None:
    """Whatever ends the submission before there is a job; --resume auto finds the run where it was."""
    run = project / "experiments" / "default"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "latest.pt").write_text("mine")
    for words, variables in (
        ([], {"SBATCH_CODE": "1", "SBATCH_SAYS": ""}),
        (["--gpu_ids", "0,1", "--slurm.tasks", "3"], {}),
    ):
        done = submit_in(project, *words, **variables)
        assert done.returncode == 2
        assert sorted(path.name for path in run.parent.iterdir()) == [".jobs", "default"]
        assert list((run.parent / ".jobs" / "default").iterdir()) == []
    assert submit_in(project).returncode == 0
    assert [path.name for path in run.iterdir()] == ["checkpoints"]  # until there is something to put in its place
    done = run_job(job_of(run) / "job.sh")
    (moved,) = run.parent.glob("default_*")
    assert done.returncode == 0 and f"moved an earlier run default to {moved}" in done.stderr
    assert (moved / "checkpoints" / "latest.pt").read_text() == "mine"


@pytest.mark.slow
def test_a_requeued_job_that_had_saved_nothing(project: Path, cluster: Path) -> None:
    """What its first start left is moved aside like an earlier run; it runs from the same code."""
    assert submit_in(project).returncode == 0
    run = project / "experiments" / "default"
    run.mkdir()
    write_status(RunPaths(run), "running", step=0)
    (run / "train.log").write_text("first")
    (run / "run.json").write_text('{"attempts": []}')
    done = run_job(job_of(run) / "job.sh", SLURM_RESTART_COUNT="1")
    assert done.returncode == 0, done.stderr
    (moved,) = run.parent.glob("default_*")
    assert sorted(path.name for path in moved.iterdir()) == ["run.json", "status.json", "train.log"]
    assert load(run)["position"]["step"] == 10
