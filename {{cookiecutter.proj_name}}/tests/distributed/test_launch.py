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

from common.distributed import DistConfig, Rank, find_rank
from common.distributed.launch import read_launch
from tests.conftest import ENVIRONMENT, PROJECT, Runs, load, metrics, run, same
from tests.ranks import start_ranks

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "rack[1-2]n[03-04]",
}  # fmt: skip
BATCH_SHELL = {"SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "123",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def place(environment: dict[str, str], launcher: str = "auto") -> tuple[Any, ...]:
    found = read_launch(environment, launcher)
    assert found is not None
    return found.launcher, found.rank, found.local_rank, found.world_size, found.local_world, found.address


def test_one_process() -> None:
    """No variables, one process on the CPU; the batch shell of a Slurm job counts as one, too."""
    assert find_rank(-1, DistConfig(), {}) == Rank()
    assert read_launch(BATCH_SHELL) is None
    assert read_launch({"MASTER_ADDR": "here", "MASTER_PORT": "1"}) is None


def test_torchrun() -> None:
    """Its variables, and the agent's own store."""
    assert place(TORCHRUN) == ("torchrun", 3, 1, 4, 2, "node1")
    found = read_launch(TORCHRUN)
    assert found is not None
    assert (found.port, found.launcher_hosts_store, found.parent) == (29400, True, os.getppid())
    rank = find_rank(-1, DistConfig(), TORCHRUN)
    assert (rank.rank, rank.local_rank, rank.world_size, rank.backend) == (3, 1, 4, "gloo")


def test_slurm() -> None:
    """A task of srun; uneven tasks per node; the first host of several brackets."""
    assert place(SLURM) == ("slurm", 2, 0, 3, 1, "rack1n03")
    assert place({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}) == ("slurm", 0, 0, 3, 2, "rack1n03")
    one_node = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0"}
    assert place(one_node)[-1] == "127.0.0.1"
    assert place({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x3)"})[4] == 1


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH], ids=["open-mpi", "mpich"])
def test_mpi(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI, and MPICH with its relatives, on one host; over several it is said where rank 0 is."""
    assert place(variables) == ("mpi", 1, 1, 2, 2, "127.0.0.1")
    first = read_launch(variables)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert read_launch(variables) == first  # and its port: that of all processes of the mpirun
    several = {**variables, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    several |= {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    assert place({**several, "MASTER_ADDR": "node7", "MASTER_PORT": "29500"})[-1] == "node7"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that so many GPUs can be seen."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


def test_devices(gpus: Any) -> None:
    """The device of each local rank; one visible GPU per Slurm task is number 0; "all"."""
    gpus(4)
    assert find_rank([2, 3], DistConfig(), TORCHRUN).device == torch.device("cuda", 3)
    assert find_rank(2, DistConfig(), {}).device == torch.device("cuda", 2)
    assert find_rank("all", DistConfig(), {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}).device == torch.device("cuda", 1)
    assert find_rank([2, 3], DistConfig(), TORCHRUN).backend == "nccl"
    assert find_rank([2, 3], DistConfig(distributed_backend="gloo"), TORCHRUN).backend == "gloo"
    gpus(1)
    two = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,2", "SLURM_LOCALID": "1"}
    assert find_rank([0, 1], DistConfig(), two).device == torch.device("cuda", 0)
    assert find_rank("all", DistConfig(), two).device == torch.device("cuda", 0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder)["model"]


# The same 30 samples a step, by 1, 2 or 3 processes; no dropout and no batch norm, whose numbers depend on the split.
LAUNCHED = ["--model", "{type: tests.small.Plain}", "--debug.max_samples", "90", "--gpu_ids", "-1"]


@pytest.fixture
def alone(runs: Runs) -> Path:
    """What one process makes of it."""
    return runs.train(*LAUNCHED, "--batch_size", "30", name="alone")


def same_as(alone: Path, folder: Path) -> bool:
    """Equal weights, within 1e-6: sums of gradients are rounded in another order."""
    one, other = weights(alone), weights(folder)
    return all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_spawn(runs: Runs, alone: Path, world: int) -> None:
    """The program starts its own processes, from the same command line."""
    words = runs.words(*LAUNCHED, "--batch_size", str(30 // world), "--dist.processes", str(world))
    done = run([sys.executable, "train.py", *words])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("finished at epoch 2") == 1
    assert same_as(alone, runs.root / "run")
    record = json.loads((runs.root / "run" / "run.json").read_text())["attempts"][0]
    assert (record["launcher"], record["world_size"]) == ("spawn", world)


@pytest.mark.slow
def test_elastic_goes_on_by_itself(runs: Runs) -> None:
    """Torchrun starts all again after a rank has died; the run continues from its last checkpoint, by itself."""
    words = runs.words(
        "--progress.epoch", "4", "--loss", "{$REPLACE: true, ce: {type: tests.small.DiesOnce}}", "--num_workers", "0",
        "--batch_size", "16",
    )  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**ENVIRONMENT, "DIES_ONCE": str(runs.root / "died")}
    done = run([*launcher, "train.py", *words], env=environment)
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stderr and len(list(runs.root.glob("run*"))) == 1
    assert [entry["step"] for entry in metrics(runs.root / "run", "val")] == [5, 10, 15, 20]
    again = ["uncut" if word == "run" else word for word in words]
    assert start_ranks(runs.root, 2, again, environment={"DIES_ONCE": str(runs.root / "died")}).codes == [0, 0]
    assert same(load(runs.root / "run")["model"], load(runs.root / "uncut")["model"])


@pytest.mark.slow
def test_a_signal_to_the_starter(runs: Runs) -> None:
    """The process that started the others hands signals on; they save, and it ends with their code."""
    words = runs.words("--dist.processes", "2", "--progress.epoch", "5000", "--progress.epoch_val", "-1")
    child = subprocess.Popen(
        [sys.executable, "train.py", *words], cwd=PROJECT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    try:
        # A line of the log takes all ranks: by then each of them listens to signals.
        status, measured = runs.root / "run" / "status.json", runs.root / "run" / "metrics.jsonl"
        until = time.monotonic() + 60
        while time.monotonic() < until and not (measured.exists() and '"train"' in measured.read_text()):
            time.sleep(0.05)
        child.send_signal(signal.SIGUSR1)
        message = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert child.returncode == 75, message
    assert json.loads(status.read_text())["reason"] == "SIGUSR1"
    assert load(runs.root / "run")["position"]["step"] > 0
