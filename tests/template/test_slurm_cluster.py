"""scripts/slurm.sh of a rendered project on a real Slurm: what is killed, preempted or out of time goes on exactly."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from real import REPORT, need
from slurm_cluster import PACKAGES, Cluster
from support import Render

pytestmark = pytest.mark.slow

# A loss that a test can hold still: at the third step it waits for the file `go`, while there is a folder HOLD.
HOLD = '''\
"""A loss that waits, or fails, where a test wants it to."""

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from common.config.registry import LOSS_REGISTRY


@LOSS_REGISTRY.register()
class HoldLoss:
    """Cross entropy. With `task` 2 it fails."""

    def __init__(self, task: int = 0) -> None:
        self.task, self.calls = task, 0

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        self.calls += torch.is_grad_enabled()
        if self.task == 2:
            raise RuntimeError("this task is to fail")
        place = Path(os.environ.get("HOLD", "/nowhere"))
        if self.calls == 3 and torch.is_grad_enabled() and place.is_dir():
            here = place / f"here{os.environ['SLURM_PROCID']}"
            here.with_suffix(".tmp").write_text(str(os.getpid()))
            here.with_suffix(".tmp").rename(here)  # complete: a reader never finds it empty
            until = time.monotonic() + 120
            while time.monotonic() < until and not (place / "go").exists():
                time.sleep(0.05)
            if (place / f"raise{os.environ['SLURM_PROCID']}").exists():
                raise RuntimeError("this process is to fail")
        if (place / "slow").exists():
            time.sleep(1)
        return torch.nn.functional.cross_entropy(output["logits"], batch["label"])
'''
SMALL = [
    "--config", "configs/default.yaml", "--debug.max_samples", "160", "--progress.epoch", "2",
    "--progress.epoch_eval", "-1", "--progress.log_every", "1", "--progress.epoch_save_latest", "1step",
    "--monitor.writers", "[]", "--loss", "{$REPLACE: true, hold: {type: HoldLoss}}",
]  # fmt: skip
STEPS = 10
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
CONV = ["--model.width", "4"]  # with batch norm and dropout
PLAIN = ["--model", "{$REPLACE: true, type: tests.small.Plain}"]  # neither: ranks change nothing but rounding


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Slurm for the tests of this file. Where there can be none, they are skipped; with REQUIRE_REAL they fail."""
    need(PACKAGES)
    place = Path(tempfile.mkdtemp(prefix="slurm"))
    try:
        running = Cluster(place)
        try:
            REPORT.append(str(running))
            yield running
        finally:
            running.stop()
    finally:
        shutil.rmtree(place)


@dataclass
class Project:
    """A rendered project on the cluster."""

    root: Path
    cluster: Cluster
    jobs: dict[str, str] = field(default_factory=dict)

    def call(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **self.cluster.environment, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONPATH": "",
            "PYTHONDONTWRITEBYTECODE": "1", **variables,
        }  # fmt: skip
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=180,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def submit(self, name: str, *words: str, **variables: str) -> str:
        """Queue a small run; its job."""
        settings = {**dict(zip(SMALL[::2], SMALL[1::2], strict=True)), "--name": name, "--batch_size": "32"}
        given = [word for pair in settings.items() if pair[0] not in words for word in pair]
        done = self.call("sh", "scripts/slurm.sh", *given, *words, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        self.jobs[name] = done.stdout.split()[1]
        return self.jobs[name]

    def run(self, name: str) -> Path:
        return self.root / "experiments" / name

    def status(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.run(name) / "status.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def log(self, name: str) -> str:
        """Return what the job wrote, all its starts."""
        files = (self.root / "experiments" / ".jobs" / name).glob("*/*.out")
        return "".join(file.read_text() for file in sorted(files))

    def ends(self, name: str, state: str = "COMPLETED") -> None:
        """Wait until the job is over; it must be so in this state."""
        job, seen = self.jobs[name], [""]

        def is_over() -> bool:
            seen.append(self._hurried(job))
            return seen[-1] in OVER

        self.cluster.wait(f"the end of {name}", is_over, patience=90)
        assert seen[-1] == state, self.log(name)

    def _hurried(self, job: str) -> str:
        """Return the job's state.

        One that is in the queue again need not wait the two minutes that Slurm has it wait.
        """
        state = self.cluster.state(job)
        if state == "PENDING" and self.cluster.field(job, "Restarts") != "0":
            time.sleep(1.5)  # at once, Slurm would revoke the job's credential
            self.cluster.hurry(job)
        return state

    def is_queued_again(self, name: str) -> None:
        """Wait until the job is in the queue, or starts, for the second time."""
        job = self.jobs[name]
        self.cluster.wait(f"{name} in the queue", lambda: self.cluster.field(job, "Restarts") != "0", patience=120)

    def final(self, name: str) -> dict[str, Any]:
        """Return the last checkpoint: everything but how the run was started."""
        state: dict[str, Any] = torch.load(self.run(name) / "checkpoints" / "latest.pt", weights_only=True)
        assert state["position"]["step"] == STEPS, self.log(name)
        del state["about"]
        return state


@pytest.fixture(scope="module")
def project(cluster: Cluster, render: Render, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A fresh project in a folder with a space in its name, under git like a user's."""
    root = tmp_path_factory.mktemp("slurm") / "my project"
    shutil.copytree(render(), root)
    (root / "custom" / "loss" / "hold_loss.py").write_text(HOLD)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return Project(root, cluster)


@pytest.fixture
def hold(tmp_path: Path, project: Project) -> Iterator[Path]:
    """A folder for `HOLD`: a run that finds it waits at its third step. Afterwards nothing waits for it any more."""
    yield tmp_path
    (tmp_path / "go").touch()


def held(project: Project, place: Path, processes: int = 1) -> None:
    """Wait until every process waits at its third step."""
    here = [place / f"here{rank}" for rank in range(processes)]
    project.cluster.wait("the third step", lambda: all(file.exists() for file in here))


@pytest.fixture(scope="module", autouse=True)
def out_of_time(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with a limit of one minute that would take longer. The others are tested while its time runs out."""
    place = tmp_path_factory.mktemp("hold")
    (place / "slow").touch()
    (place / "go").touch()
    words = ["--slurm.partition", "apart", "--slurm.time", "1", "--slurm.signal_seconds", "30"]
    project.submit("out_of_time", *CONV, "--progress.epoch", "60", *words, HOLD=str(place))
    return place


@pytest.fixture(scope="module")
def alone(project: Project) -> dict[str, Any]:
    """What one process ends with that is undisturbed."""
    project.submit("alone", *CONV)
    project.ends("alone")
    return project.final("alone")


@pytest.fixture(scope="module")
def pair(project: Project) -> dict[str, Any]:
    """What two processes on two nodes end with that is undisturbed."""
    project.submit("pair", *CONV, "--slurm.nodes", "2", "--batch_size", "16")
    project.ends("pair")
    return project.final("pair")


def stops(project: Project, name: str) -> list[str]:
    """Return the signals that stopped the run; it went on each time where it had stopped."""
    log = (project.run(name) / "train.log").read_text()
    found = re.findall(r"stopped at epoch \d+, step (\d+): (\w+)", log)
    assert re.findall(r"= resumed at step (\d+) =", log) == [step for step, _ in found]
    return [reason for _, reason in found]


def differing(first: Any, second: Any, at: str = "") -> list[str]:
    """Return where two nested values are not equal to the last bit."""
    if isinstance(first, torch.Tensor):
        return [] if isinstance(second, torch.Tensor) and torch.equal(first, second) else [at]
    if isinstance(first, dict) and isinstance(second, dict):
        return [part for key in first.keys() | second.keys()
                for part in differing(first.get(key), second.get(key), f"{at}/{key}")]  # fmt: skip
    if isinstance(first, (list, tuple)):
        return [part for number, pair in enumerate(zip(first, second, strict=True))
                for part in differing(*pair, f"{at}/{number}")]  # fmt: skip
    return [] if first == second else [at]


def test_a_job_trains_and_can_be_evaluated(project: Project, alone: dict[str, Any]) -> None:
    """One process on one node; everything lies where it is said to."""
    assert project.status("alone")["state"] == "finished"
    assert "finished at epoch 2, step 10" in project.log("alone")
    best = project.run("alone") / "checkpoints" / "best.pt"
    done = project.call(sys.executable, "evaluate.py", "--model_pt", str(best))
    assert done.returncode == 0, done.stderr
    assert "Accuracy" in done.stdout


def test_processes_on_several_nodes_train_as_one(project: Project) -> None:
    """1, 2 x 1 and 2 x 2 processes at one global batch learn the same, but for rounding (1e-6)."""
    project.submit("one", *PLAIN)
    project.submit("two", *PLAIN, "--slurm.nodes", "2", "--batch_size", "16")
    project.submit("four", *PLAIN, "--slurm.nodes", "2", "--slurm.tasks=2", "--batch_size", "8")
    for name in ("one", "two", "four"):
        project.ends(name)
    weights = project.final("one")["model"]
    for name in ("two", "four"):
        for key, value in project.final(name)["model"].items():
            assert (value - weights[key]).abs().max() < 1e-6, f"{key} of {name}"
    assert json.loads((project.run("four") / "run.json").read_text())["attempts"][0]["world_size"] == 4


def test_a_signal_saves_and_the_job_goes_on_exactly(project: Project, pair: dict[str, Any], hold: Path) -> None:
    """As at the time limit, on two nodes: saved, queued again, continued; the end is bit-identical."""
    job = project.submit("cut", *CONV, "--slurm.nodes", "2", "--batch_size", "16", HOLD=str(hold))
    held(project, hold, processes=2)
    project.cluster.call("scancel", "--signal=USR1", job)
    (hold / "go").touch()
    project.is_queued_again("cut")
    project.ends("cut")
    assert stops(project, "cut") == ["SIGUSR1"]
    assert "this resume is bit-exact" in project.log("cut")
    assert differing(pair, project.final("cut")) == []


# As Slurm writes them: it never puts text behind the last bracket. In more than two, its order is another one.
NODE_LISTS = [
    "a", "a1,b2", "x-y-ib,z.example.org", "a1,a1", "n[0-0]", "n[08-11]", "n[098-101]", "n[007-10]",
    "n[1-02]", "n[00-2]", "a[001-003,7],b", "n[3,1-2]", "b[2-3],a[1,1-2]", "10.0.0.[8-10]", "rack[1-2]n[03-04]",
    "n[1-2][1-2]", "n[1-2]n[1-2]n[1-2]", "[1-3]", "n[099999999998-099999999999]",
]  # fmt: skip
COMPRESSED = ["n1,n2,n3,n10", "a01,a02,a3,b", "r1n1,r1n2,r2n1,r2n2", "n9,n10,n011", "gpu-a100-1,gpu-a100-2,login"]


def test_node_lists(project: Project) -> None:
    """The first of a list is found without scontrol as by it; also of what it makes of names itself."""
    call = project.cluster.call
    lists = NODE_LISTS + [call("scontrol", "show", "hostlist", names) for names in COMPRESSED]
    script = (
        "import sys; from common.distributed.launch import read_launch; task = {'SLURM_STEP_ID': '0', 'SLURM_PROCID': "
        "'0', 'SLURM_LOCALID': '0', 'SLURM_NODEID': '0', 'SLURM_STEP_NUM_TASKS': '2', 'SLURM_STEP_TASKS_PER_NODE': "
        "'1(x2)'}; print([read_launch({**task, 'SLURM_STEP_NODELIST': x}).address for x in sys.argv[1:]])"
    )
    done = project.call(sys.executable, "-c", script, *lists)
    assert done.returncode == 0, done.stderr
    for text, first in zip(lists, ast.literal_eval(done.stdout), strict=True):
        assert first == call("scontrol", "show", "hostnames", text).split()[0], text


def test_a_requeue_from_outside(project: Project, alone: dict[str, Any], hold: Path) -> None:
    """An administrator takes the machine: the same job starts again and continues exactly."""
    job = project.submit("requeued", *CONV, HOLD=str(hold))
    held(project, hold)
    project.cluster.call("scontrol", "requeue", job)
    (hold / "go").touch()
    project.is_queued_again("requeued")
    project.ends("requeued")
    assert differing(alone, project.final("requeued")) == []


@pytest.mark.parametrize("partition", ["low", "low_grace"])
def test_preemption(project: Project, alone: dict[str, Any], hold: Path, partition: str) -> None:
    """Another job needs the place, now or within 30 s: saved, queued again, continued; bit-identical.

    Slurm signals the loader's workers too.
    """
    job = project.submit(partition, *CONV, "--num_workers", "1", "--slurm.partition", partition, HOLD=str(hold))
    held(project, hold)
    urgent = ["sbatch", "--parsable", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    other = project.cluster.call(*urgent)
    project.cluster.wait("preemption", lambda: project.cluster.field(job, "PreemptTime") != "None")
    (hold / "go").touch()
    project.is_queued_again(partition)
    project.ends(partition)
    assert stops(project, partition) == ["SIGTERM"]
    assert project.cluster.state(other) == "COMPLETED"
    assert differing(alone, project.final(partition)) == []


def test_a_node_fails(project: Project, pair: dict[str, Any], hold: Path) -> None:
    """Slurm queues the job again; the lock of the dead start does not hold it up; bit-identical."""
    project.submit("node_failure", *CONV, "--slurm.nodes", "2", "--batch_size", "16", HOLD=str(hold))
    held(project, hold, processes=2)
    project.cluster.power_off("n1")
    (hold / "go").touch()
    project.cluster.power_on("n1")
    project.is_queued_again("node_failure")
    project.ends("node_failure")
    assert differing(pair, project.final("node_failure")) == []


def test_a_finished_run_does_not_train_again(project: Project, alone: dict[str, Any]) -> None:
    """Queued again by hand, it ends at once."""
    job = project.jobs["alone"]
    before = (project.run("alone") / "train.log").read_text()
    project.cluster.call("scontrol", "requeue", job)
    project.is_queued_again("alone")
    project.ends("alone")
    assert "this run finished at step 10 already" in project.log("alone")
    assert (project.run("alone") / "train.log").read_text() == before


def test_an_array_with_a_task_that_fails(project: Project) -> None:
    """Each task has its own folder, seed and fate."""
    loss = ["--loss", "{$REPLACE: true, hold: {type: HoldLoss, task: %a}}"]
    job = project.submit("array", *CONV, "--slurm.array", "1-3", *loss, "--dist.random_seed", "%a")
    for task, state in (("1", "COMPLETED"), ("2", "FAILED"), ("3", "COMPLETED")):
        project.jobs["array"] = f"{job}_{task}"
        project.ends("array", state)
    states = [project.final(f"array/task_{task}") for task in (1, 3)]
    assert differing(states[0]["model"], states[1]["model"])
    assert "this task is to fail (in trying a batch of val" in project.status("array/task_2")["reason"]
    assert sorted(path.name for path in project.run("array").iterdir()) == ["task_1", "task_2", "task_3"]


def test_a_task_of_an_array_goes_on(project: Project, hold: Path) -> None:
    """It alone is queued again, not the whole array."""
    job = project.submit("tasks", *CONV, "--slurm.array", "4,6", "--dist.random_seed", "%a", HOLD=str(hold))
    held(project, hold)
    project.cluster.wait("both", lambda: all(project.status(f"tasks/task_{task}") for task in (4, 6)))
    project.cluster.call("scancel", "--signal=USR1", f"{job}_4")
    (hold / "go").touch()
    project.jobs["tasks"] = f"{job}_4"
    project.is_queued_again("tasks")
    project.ends("tasks")
    project.jobs["tasks"] = f"{job}_6"
    project.ends("tasks")
    assert project.cluster.field(f"{job}_6", "Restarts") == "0"
    for task, starts in ((4, 2), (6, 1)):
        project.final(f"tasks/task_{task}")
        (file,) = (project.root / "experiments" / ".jobs" / "tasks").glob(f"*/starts_{task}.jsonl")
        assert len(file.read_text().splitlines()) == starts


def test_gpus_are_asked_for_and_seen(project: Project, tmp_path: Path) -> None:
    """Slurm grants the GPUs; a PyTorch that cannot use them says so, and the job is not queued again."""
    blind = tmp_path / "python"  # these GPUs are not real, even where there are real ones
    blind.write_text(f'#!/bin/sh\nCUDA_VISIBLE_DEVICES= exec {shlex.quote(sys.executable)} "$@"\n')
    blind.chmod(0o755)
    project.submit("gpus", *CONV, "--slurm.gpus", "2", "--slurm.nodes", "2", PYTHON=str(blind))
    project.ends("gpus", "FAILED")
    assert "gpu_ids: [0, 1]: PyTorch finds 0 CUDA device(s)" in project.log("gpus")
    job = project.jobs["gpus"]
    assert "gres:gpu:2" in project.cluster.field(job, "TresPerNode")
    assert project.cluster.field(job, "NumTasks") == "4"
    assert project.cluster.field(job, "Restarts") == "0"
    assert not (project.run("gpus") / "run.json").exists()
    done = project.call("sh", "scripts/slurm.sh", *SMALL, "--name", "too_many", "--slurm.gpus", "3")
    assert done.returncode == 2
    assert "Requested node configuration is not available" in done.stderr


def test_nodes_without_scontrol(project: Project, hold: Path) -> None:
    """The processes find each other all the same; nothing is lost, and a new job continues."""
    words = [*CONV, "--slurm.partition", "bare", "--slurm.nodes", "2", "--batch_size", "16"]
    job = project.submit("bare", *words, HOLD=str(hold))
    held(project, hold, processes=2)
    project.cluster.call("scancel", "--signal=USR1", job)
    (hold / "go").touch()
    project.ends("bare", "FAILED")
    assert project.cluster.field(job, "ExitCode") == "75:0"
    assert "could not be queued again: [Errno" in project.log("bare")
    assert "'scontrol'" in project.log("bare")
    project.submit("bare", *words, "--resume", "auto")
    project.ends("bare")
    project.final("bare")


@pytest.mark.parametrize(
    ("how", "report"),
    [("killed", "the process exited without an error message"), ("raised", "RuntimeError: this process is to fail")],
    ids=["killed", "raised"],
)
def test_a_process_that_fails_ends_the_job(project: Project, hold: Path, how: str, report: str) -> None:
    """All within 10 s, with its reason; as failed, not queued again."""
    job = project.submit(how, *CONV, "--slurm.nodes", "2", "--batch_size", "16", HOLD=str(hold))
    held(project, hold, processes=2)
    processes = [int((hold / f"here{rank}").read_text()) for rank in (0, 1)]
    if how == "killed":
        os.kill(processes[1], 9)
    else:
        (hold / "raise1").touch()
        (hold / "go").touch()
    project.cluster.wait("their end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), patience=10)
    project.ends(how, "FAILED")
    log, status = project.log(how), project.status(how)
    assert re.search(rf"=+ rank 1 failed =+\n +{report}", log), log
    assert f"n2: task 1: {'Killed' if how == 'killed' else 'Exited with exit code 1'}" in log
    assert status["state"] == "failed"
    assert status["reason"].startswith(f"rank 1: {report}")
    assert project.cluster.field(job, "Restarts") == "0"


def test_a_cancelled_job_has_saved_and_stays_away(project: Project, alone: dict[str, Any], hold: Path) -> None:
    """Scancel does not lead back into the queue. While it is in there, the run is not submitted again."""
    job = project.submit("cancelled", *CONV, HOLD=str(hold))
    held(project, hold)
    again = ["sh", "scripts/slurm.sh", *SMALL, *CONV, "--name", "cancelled", "--resume", "auto"]
    done = project.call(*again)
    assert done.returncode == 2
    assert f"belongs to job {job}, which is RUNNING" in done.stderr
    project.cluster.call("scancel", job)
    (hold / "go").touch()
    project.ends("cancelled", "CANCELLED")
    project.cluster.wait("the last save", lambda: project.status("cancelled")["state"] == "stopped")
    project.submit("cancelled", *CONV, "--resume", "auto")
    project.ends("cancelled")
    assert differing(alone, project.final("cancelled")) == []


def test_inside_an_allocation(project: Project, pair: dict[str, Any]) -> None:
    """Salloc, then the same command: it trains at once, on all nodes."""
    words = [*SMALL, *CONV, "--slurm.nodes", "2", "--batch_size", "16", "--name", "salloc"]
    done = project.call("salloc", "--nodes=2", "--ntasks-per-node=1", "sh", "scripts/slurm.sh", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert differing(pair, project.final("salloc")) == []


def test_the_time_limit_itself(project: Project, out_of_time: Path) -> None:
    """Slurm sends the signal, in time to save, and the job continues."""
    project.is_queued_again("out_of_time")
    (out_of_time / "slow").unlink()
    project.ends("out_of_time")
    assert project.status("out_of_time")["state"] == "finished"
    assert set(stops(project, "out_of_time")) == {"SIGUSR1"}
    assert "TIME LIMIT" not in project.log("out_of_time")


def test_a_sweep_is_an_array(project: Project) -> None:
    """tools.sweep --slurm: a task for each combination; the same command queues those that have not finished."""
    words = [*SMALL, "--batch_size", "32", "--name", "swept", "--slurm", "--jobs", "3", "--slurm.time", "5"]
    sweep = [sys.executable, "-m", "tools.sweep", *words, "--grid", "loss.hold.task=1,2", "model.width=4,8"]
    for starts, tasks in enumerate(("0,1,2,3%3", "2,3%3")):
        done = project.call(*sweep)
        assert done.returncode == 0, done.stdout + done.stderr
        job = re.findall(r"^job (\d+) is queued", done.stdout, re.MULTILINE)[0]
        files = sorted((project.root / "experiments" / ".jobs" / "swept").glob("*/job.sh"))
        assert len(files) == 1 + starts
        assert f'--array="{tasks}"' in files[-1].read_text()
        for task in re.findall(r"\d", tasks.partition("%")[0]):
            project.jobs["swept"] = f"{job}_{task}"
            project.ends("swept", "COMPLETED" if task in "01" else "FAILED")
    names = [f"swept/task={task}_width={width}" for task in (1, 2) for width in (4, 8)]
    assert [project.status(name)["state"] for name in names] == ["finished", "finished", "failed", "failed"]
    widths = [project.final(name)["model"]["head.2.weight"].shape[1] for name in names[:2]]
    assert widths == [32, 64]
    shown = project.call(sys.executable, "-m", "tools.runs", str(project.run("swept")))
    assert "this task is to fail" in shown.stdout
    assert "width" in shown.stdout
