"""Who a process is: from each launcher's variables, from devices, and from real launches."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from common import build
from common.base.errors import UserError
from common.distributed import DistConfig, find_rank, spawn
from common.distributed.launch import read_launch
from common.progress import Position
from common.trainer import Trainer
import evaluate
import train
from tests.conftest import ENVIRONMENT, PROJECT, Runs, load, metrics, run
from tests.distributed.test_launch import LAUNCHED, OPEN_MPI, SLURM, TORCHRUN, place, same_as
from tests.ranks import free_port, several, start_ranks
from tests.small import Plain


def test_ports_differ_by_job() -> None:
    """From job, array task, step and restart; alike for the tasks of one step; MASTER_PORT wins."""
    ports = set()
    for change in ({}, {"SLURM_JOB_ID": "42"}, {"SLURM_ARRAY_TASK_ID": "1"}, {"SLURM_STEP_ID": "1"}):
        found = read_launch({**SLURM, **change})
        other = read_launch({**SLURM, **change, "SLURM_PROCID": "1"})
        assert found is not None and other is not None
        assert found.port == other.port and 10000 <= found.port < 30000
        ports.add(found.port)
    assert len(ports) == 4
    explicit = read_launch({**SLURM, "MASTER_ADDR": "me", "MASTER_PORT": "5000"})
    assert explicit is not None and (explicit.address, explicit.port) == ("me", 5000)


def test_variables_set_by_hand() -> None:
    """A shell that sets them may end while the run continues: the run must not end with it."""
    variables = {key: value for key, value in TORCHRUN.items() if not key.startswith("TORCHELASTIC")}
    found = read_launch(variables)
    assert found is not None and found.parent is None and not found.launcher_hosts_store
    assert place({**SLURM, **variables}, "torchrun")[0] == "torchrun"


def test_started_again() -> None:
    """By Slurm. What torchrun has started before, its store tells."""
    assert find_rank(-1, DistConfig(), {"SLURM_RESTART_COUNT": "1"}).restarted
    assert not find_rank(-1, DistConfig(), {"SLURM_RESTART_COUNT": "0"}).restarted
    assert not find_rank(-1, DistConfig(), TORCHRUN).restarted


def test_who_wins() -> None:
    """Explicit settings win; torchrun and mpirun inside a Slurm job count, not the srun that carried them."""
    assert place({**SLURM, **TORCHRUN})[0] == "torchrun"
    assert place({**SLURM, **OPEN_MPI})[0] == "mpi"
    assert place({**SLURM, **OPEN_MPI}, "slurm")[0] == "slurm"
    assert read_launch({**SLURM, **TORCHRUN}, "none") is None


KUBEFLOW = {"RANK": "0", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
LEFT_OVER = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node9", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "RANK=1 and WORLD_SIZE=2 contradict SLURM_PROCID=2 of 3"),
        (["--dist.launcher", "mpi"], "dist.launcher: mpi, but its variables are not set"),
        (["--dist.launcher", "slurm", "--dist.processes", "5"], "dist.processes: 5, but slurm started 1"),
        (["--dist.launcher", "torchrun", "--dist.processes", "5"], "dist.processes: 5, but torchrun started 2"),
        (["--dist.launcher", "none", "--progress.max_steps", "1"], None),
    ],
)
def test_the_setting_wins(runs: Runs, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str | None) -> None:
    """dist.launcher on the command line, against variables that are there, or left over."""
    for name, value in {**SLURM, **LEFT_OVER}.items():
        monkeypatch.setenv(name, value)
    if message is None:
        assert json.loads((runs.train(*words) / "run.json").read_text())["attempts"][0]["world_size"] == 1
    else:
        with pytest.raises(UserError, match=message):
            runs.train(*words)


@pytest.mark.parametrize(
    ("variables", "launcher", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "auto", ["LOCAL_RANK ''", "an integer"]),
        ({**TORCHRUN, "RANK": "one"}, "auto", ["RANK 'one'", "an integer"]),
        ({**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": ""}, "auto", None),
        ({}, "slurm", ["dist.launcher: slurm", "not set"]),
        ({"WORLD_SIZE": "4"}, "auto", ["RANK ''", "LOCAL_RANK ''", "MASTER_PORT ''"]),
        ({"LOCAL_RANK": "0"}, "auto", ["RANK ''", "WORLD_SIZE ''"]),
        ({**KUBEFLOW, "WORLD_SIZE": "2"}, "auto", ["LOCAL_RANK ''", "LOCAL_WORLD_SIZE=1"]),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "auto", ["MPI_LOCALRANKID ''", "MPI_LOCALNRANKS ''"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "auto", ["OMPI_COMM_WORLD_SIZE ''"]),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "auto", ["SLURM_NODEID ''"]),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "1"}, "auto", ["SLURM_STEP_NUM_TASKS ''"]),
        ({**TORCHRUN, "RANK": "4"}, "auto", ["RANK=4 of WORLD_SIZE=4"]),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "auto", ["LOCAL_RANK=-1"]),
    ],
)
def test_contradictions(variables: dict[str, str], launcher: str, message: list[str] | None) -> None:
    """Half-set or contradicting variables are refused, by name."""
    if message is None:  # set by hand, beside Slurm's
        del variables["TORCHELASTIC_RUN_ID"]
        message = ["RANK=3 and WORLD_SIZE=4 contradict SLURM_PROCID=2 of 3", "--dist.launcher slurm"]
    with pytest.raises(UserError) as error:
        read_launch(variables, launcher)
    for part in message:
        assert part in str(error.value)
    assert str(error.value).endswith("to train in this process alone: --dist.launcher none")


@pytest.mark.parametrize(
    "variables",
    [{"WORLD_SIZE": "1"}, {**KUBEFLOW, "WORLD_SIZE": "1"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}],
    ids=str,
)
def test_variables_of_a_single_process(variables: dict[str, str]) -> None:
    """They say nothing, so the others need not be there."""
    assert read_launch(variables) is None


@pytest.mark.slow
def test_missing_ranks_are_named_before_the_timeout(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a shell of `srun --pty`, the other tasks do not run train.py."""
    monkeypatch.setattr("common.distributed.group._REPORT_AFTER_S", 0.1)
    variables = {
        **{f"SLURM_{name}": "0" for name in ("STEP_ID", "PROCID", "LOCALID", "NODEID")},
        **{f"SLURM_STEP_{name}": "4" for name in ("NUM_TASKS", "TASKS_PER_NODE", "NODELIST")},
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"rank 1, 2, 3 of 4 did not arrive.*--dist.launcher none"):
        runs.train("--dist.timeout", "1")
    text = capsys.readouterr().err
    assert "for rank 1, 2, 3 of 4" in text and "--dist.launcher none" in text


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a1,b2", "a1"),
        ("a[001-003,7],b", "a001"),
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("x-y[1]-ib,z", "x-y1-ib"),
        ("10.0.0.[8-10]", "10.0.0.8"),
        ("n[08-11]", "n08"),
    ],
)
def test_node_lists(nodes: str, first: str) -> None:
    """The first host of Slurm's list."""
    assert place({**SLURM, "SLURM_STEP_NODELIST": nodes})[-1] == first


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that so many GPUs can be seen."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


@pytest.mark.parametrize(
    ("seen", "wanted", "message"),
    [
        (4, [0, 1, 2], ["3 device(s)", "2 process(es)", "start 3, or name 2 device(s)"]),
        (1, [0], ["1 device(s)", "2 process(es)", "start 1, or name 2 device(s)"]),
        (2, [0, 5], ["PyTorch finds 2 CUDA device(s)"]),
        (2, [0, 0], ["name different numbers"]),
        (2, [0, -1], ["name different numbers"]),
        (2, [], ["name different numbers"]),
        (0, [0, 1], ["PyTorch finds 0 CUDA device(s)", "--gpu_ids -1"]),
        (0, "all", ["PyTorch finds 0 CUDA device(s)", "--gpu_ids -1"]),
    ],
)
def test_devices_that_cannot_be(gpus: Any, seen: int, wanted: Any, message: list[str]) -> None:
    """More ranks than GPUs, more GPUs than ranks, or none at all: refused, with what would be right."""
    gpus(seen)
    with pytest.raises(UserError) as error:
        find_rank(wanted, DistConfig(), TORCHRUN)
    for part in message:
        assert part in str(error.value)


def test_the_wrong_backend() -> None:
    """Refused before anything hangs."""
    with pytest.raises(UserError, match="nccl needs CUDA"):
        find_rank(-1, DistConfig(distributed_backend="nccl"), TORCHRUN)


def test_processes_and_a_launcher() -> None:
    with pytest.raises(UserError, match=r"dist.processes: 3, but torchrun started 2"):
        find_rank(-1, DistConfig(processes=3), TORCHRUN)


@pytest.fixture
def alone(runs: Runs) -> Path:
    """What one process makes of it."""
    return runs.train(*LAUNCHED, "--batch_size", "30", name="alone")


def note_python(trainer: Trainer) -> None:
    """A plug-in: how Python was started."""
    found = [sys.flags.quiet, sys.warnoptions]
    (trainer.paths.root / f"python{trainer.rank.rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-q", "-Wignore:x", "-W", "ignore:y"], pytest.param([], marks=pytest.mark.full)])
def test_spawn_starts_python_as_it_was_started(runs: Runs, flags: list[str]) -> None:
    """What the interpreter was given holds for the processes that train, and not only for their starter."""
    plugin = "[engine.distributed.test_launch:note_python]"
    words = runs.words("--dist.processes", "2", "--progress.epoch", "1", "--plugins", plugin)
    done = run([sys.executable, *flags, "train.py", *words])
    assert done.returncode == 0, done.stderr
    expected = [1, ["ignore:x", "ignore:y"]] if flags else [0, []]
    for rank in range(2):
        assert json.loads((runs.root / "run" / f"python{rank}.json").read_text()) == expected


@pytest.mark.slow
def test_spawn_for_evaluation(runs: Runs, alone: Path) -> None:
    """evaluate.py starts its processes in the same way."""
    command = [sys.executable, "evaluate.py", "--model_pt", str(alone / "checkpoints" / "latest.pt")]
    done = run([*command, "--dist.processes", "2"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Accuracy") == 1 and "samples   90" in done.stdout


def two_agents(
    runs: Runs, words: list[str], *options: str, nodes: str = "2", **variables: str
) -> tuple[list[int], list[str]]:
    """torchrun on two nodes, here two agents on one that meet at a c10d rendezvous; codes, and what they printed."""
    agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-id=x"]
    agent += [*options, "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    agents, outputs = [], [runs.root / f"agent{number}.txt" for number in (0, 1)]
    try:
        for number, output in enumerate(outputs):
            # The first one holds the meeting place. It waits a second for more nodes, where there may be more.
            command = [*agent, f"--rdzv-conf=is_host={number == 0},last_call_timeout=1", "train.py", *words]
            with output.open("w") as file:
                agents.append(subprocess.Popen(command, cwd=PROJECT, env={**ENVIRONMENT, **variables}, stderr=file))
        codes = [each.wait(110) for each in agents]
    finally:
        for each in agents:
            each.kill()
    return codes, [output.read_text() for output in outputs]


@pytest.mark.slow
def test_two_agents_meet(runs: Runs, alone: Path) -> None:
    """Torchrun over two nodes."""
    codes, texts = two_agents(runs, runs.words(*LAUNCHED, "--batch_size", "15"))
    assert codes == [0, 0], texts
    assert same_as(alone, runs.root / "run")


@pytest.mark.slow
def test_job_script_of_two_nodes(runs: Runs, alone: Path) -> None:
    """On one of them it says what to type on each; typed there, it repeats the run."""
    codes, texts = two_agents(runs, runs.words(*LAUNCHED, "--batch_size", "15"))
    assert codes == [0, 0], texts
    job = runs.root / "run" / "job.sh"
    environment = {**ENVIRONMENT, "PYTHONPATH": ""}
    done = run(["sh", str(job)], env=environment)
    assert done.returncode == 2
    assert "2 hosts" in done.stderr and f"MASTER_ADDR=<name of the first host> sh '{job}'" in done.stderr
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [subprocess.Popen(["sh", str(job)], env=environment, cwd="/") for _ in range(2)]
    try:
        assert [each.wait(110) for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()
    assert same_as(alone, runs.root / "run_replicate")
    (attempt,) = json.loads((runs.root / "run_replicate" / "run.json").read_text())["attempts"]
    assert (attempt["world_size"], attempt["processes_per_host"]) == (2, 1)


def as_tasks_on_two_nodes() -> None:
    """Slurm's variables instead of torchrun's."""
    number = os.environ.pop("RANK")
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    tasks = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    os.environ.update(SLURM | tasks | {"SLURM_PROCID": number, "SLURM_NODEID": number, "SLURM_LOCALID": "0"})


@pytest.mark.slow
def test_job_script_of_two_nodes_of_slurm(runs: Runs) -> None:
    """Srun starts what srun had started."""
    ended = start_ranks(runs.root, 2, runs.words(*LAUNCHED, "--batch_size", "15"), setup=as_tasks_on_two_nodes)
    assert ended.codes == [0, 0], ended.texts
    srun = runs.root / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\necho "$@" >{runs.root}/called\n')
    srun.chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{srun.parent}:{ENVIRONMENT['PATH']}"}
    done = run(["sh", str(runs.root / "run" / "job.sh"), "--progress.epoch", "3"], env=environment)
    assert done.returncode == 0, done.stderr
    called = (runs.root / "called").read_text()
    assert called.startswith("--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 ")
    assert "torch.distributed" not in called and " train.py --config " in called
    assert called.endswith(" --progress.epoch 3\n")


@pytest.mark.slow
def test_elastic_over_two_agents(runs: Runs) -> None:
    """One node's process dies; all are started again, though only that node's agent counts a restart."""
    words = runs.words(
        "--progress.epoch", "4", "--loss", "{$REPLACE: true, ce: {type: tests.small.DiesOnce}}", "--batch_size", "16",
        "--dist.timeout", "30",
    )  # fmt: skip
    codes, texts = two_agents(runs, words, "--max-restarts=2", DIES_ONCE=str(runs.root / "died"))
    assert codes == [0, 0], texts
    assert (runs.root / "died").exists() and len(list(runs.root.glob("run*"))) == 1
    assert [entry["step"] for entry in metrics(runs.root / "run", "val")] == [5, 10, 15, 20]


@pytest.mark.slow
def test_elastic_with_a_node_less(runs: Runs) -> None:
    """One of two nodes is lost for good; the other continues alone, and the log says what that changes."""
    words = runs.words(
        "--progress.epoch", "3", "--loss", "{$REPLACE: true, ce: {type: tests.small.DiesOnce, node: true}}",
        "--batch_size", "16", "--dist.timeout", "30",
    )  # fmt: skip
    codes, texts = two_agents(runs, words, "--max-restarts=2", nodes="1:2", DIES_ONCE=str(runs.root / "died"))
    assert codes == [0, -9], texts
    assert "samples per step 32 -> 16" in texts[0] and "not guaranteed to be bit-exact or sample-exact" in texts[0]
    assert len(list(runs.root.glob("run*"))) == 1
    # The second epoch had begun with both, but what was done of it since the last save is done again.
    assert [entry["step"] for entry in metrics(runs.root / "run", "val")] == [5, 15, 25]


@pytest.mark.slow
def test_a_run_is_evaluated_and_resumed_by_others(runs: Runs) -> None:
    """How a run was started is not asked of those who use its own config afterwards."""
    folder = runs.root / "run"
    several(runs, 2, runs.words("--dist.processes", "2", "--progress.epoch", "1"))
    best = ["--model_pt", str(folder / "checkpoints" / "best.pt")]
    several(runs, 3, best, program="evaluate")
    assert evaluate.main(best) == 0  # in this very process
    several(runs, 1, ["--resume", str(folder), "--progress.epoch", "2", "--batch_size", "64"])
    assert [entry["step"] for entry in metrics(folder, "val")] == [3, 6]


def test_processes_that_no_command_would_start(runs: Runs) -> None:
    """Refused, with what would be right."""
    with pytest.raises(UserError, match=r"--dist.launcher spawn starts them"):
        train.main(runs.words("--dist.processes", "2", "--dist.launcher", "none"))


def unready() -> Plain:
    """Return a model that ends its process once, before there is a run."""
    marker = Path(os.environ["DIES_ONCE"])
    if os.environ["RANK"] == "0" and not marker.exists():
        marker.touch()
        os._exit(1)
    return Plain()


@pytest.mark.slow
def test_a_restart_takes_no_other_run(runs: Runs) -> None:
    """It died before it had a run; what lies there under its name is an earlier one, which is finished."""
    words = runs.words("--batch_size", "16", "--model", "{type: engine.distributed.test_launch.unready}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**ENVIRONMENT, "DIES_ONCE": str(runs.root / "died")}
    for kept in (1, 2):
        done = run([*launcher, "train.py", *words], env=environment)
        assert done.returncode == 0, done.stderr
        (runs.root / "died").unlink(missing_ok=True)
        assert "resuming" not in done.stderr
        assert len(list(runs.root.glob("run*"))) == kept
        assert [entry["step"] for entry in metrics(runs.root / "run", "val")] == [5, 10]


def test_a_job_that_is_queued_again_takes_no_other_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a job of Slurm take what another one, or a person, has left; its own it continues with."""
    runs.train("--progress.epoch", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    folder = runs.train("--progress.epoch", "1")
    assert "resuming" not in (folder / "train.log").read_text() and len(list(runs.root.glob("run*"))) == 2
    runs.train("--progress.epoch", "2")
    assert "resuming" in (folder / "train.log").read_text() and len(list(runs.root.glob("run*"))) == 2


def test_a_signal_while_processes_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes when only some of them are there reaches all."""
    program = tmp_path / "program.py"
    program.write_text("import time\ntime.sleep(6)\n")
    popen, started = subprocess.Popen, []

    def start(*arguments: Any, **named: Any) -> Any:
        started.append(popen(*arguments, **named))
        if len(started) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    assert spawn(-1, DistConfig(processes=2), [str(program)]) == 128 + 15
    assert [child.returncode for child in started] == [-15, -15]


@pytest.mark.slow
def test_the_starter_is_killed_at_once(runs: Runs) -> None:
    """Before its processes could ask the system to end with it; they end all the same, and do not wait."""
    words = runs.words("--dist.processes", "2", "--progress.epoch", "100000")
    starter = subprocess.Popen(
        [sys.executable, "train.py", *words], cwd=PROJECT, env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
    there: list[str] = []
    try:
        until = time.monotonic() + 60
        while len(there := children.read_text().split()) < 2 and time.monotonic() < until:
            time.sleep(0.005)
    finally:
        starter.kill()
        starter.wait()
    until = time.monotonic() + 60
    while (left := [pid for pid in there if Path("/proc", pid).exists()]) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert (len(there), left) == (2, [])


def tell_rank_1(trainer: Trainer) -> None:
    """A plug-in: one rank of several gets a signal to stop, early or late."""
    stepped, at = trainer.monitor.step_done, int(os.environ["TOLD_AT"])

    def tell(position: Position, samples: int) -> None:
        stepped(position, samples)
        if trainer.rank.rank == 1 and position.step == at:
            os.kill(os.getpid(), signal.SIGUSR1)

    trainer.monitor.step_done = tell  # type: ignore[assignment, method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 230])
def test_a_signal_to_one_rank(runs: Runs, at: int) -> None:
    """All ranks save and stop at the same step, soon; also when they ask one another only now and then."""
    words = [
        "--plugins",
        f"[{__name__}:tell_rank_1]",
        "--progress.epoch",
        "500",
        "--progress.epoch_val",
        "-1",
    ]
    ended = start_ranks(runs.root, 2, runs.words(*LAUNCHED, *words), environment={"TOLD_AT": str(at)})
    assert ended.codes == [75, 75], ended.texts
    assert at < load(runs.root / "run")["position"]["step"] <= at + 102
    assert json.loads((runs.root / "run" / "status.json").read_text())["reason"] == "SIGUSR1"


def test_a_signal_before_the_first_step(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to come again that arrives while the program starts is kept until there is something to save."""
    folder = runs.root / "run"

    def signalled(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return built(*arguments)

    built = build.build_stream
    monkeypatch.setattr(build, "build_stream", signalled)
    assert runs.fail() == 75
    assert load(folder)["position"]["step"] == 1
    monkeypatch.setattr(build, "build_stream", built)
    assert runs.fail("--resume", "auto") == 0
