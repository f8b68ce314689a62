"""This process' place in the run, from its launcher's variables: torchrun, Slurm, MPI, or our own `spawn`."""

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.base.errors import UserError

_CPU = torch.device("cpu")
_MPI = (  # rank, number of processes, rank on this host, number of processes there
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
SPAWNED = "TRAIN_SPAWNED"  # set by `spawn` for the processes it starts: its own process id
ALONE = "to train in this process alone: --dist.launcher none"  # ends messages about variables that may be left over

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Rank:
    """This process' place: `rank` of `world_size`, on its host `local_rank` of `local_world`, and its device.

    Attributes:
        backend: exchanges gradients, "nccl" or "gloo"; "" for a single process.
        launcher: the one that started the processes; "python" for none.
        address, port: where the processes find each other.
        launcher_hosts_store: the launcher listens at that address; otherwise rank 0 does.
        parent: id of the process that started this one, if it lives as long as the run; None for a shell.
        restarted: Slurm has started this job before, or torchrun these processes.
        launched_as: identifiers of this launch, the same after a restart.
        control: process group on CPU for small exchanges, which then never wait for the GPU.
        failure_monitor: ends this process when another one fails (`common.failure.hub`); None before it exists.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = _CPU
    backend: str = ""
    launcher: str = "python"
    local_world: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    launcher_hosts_store: bool = False
    parent: int | None = None
    restarted: bool = False
    launched_as: tuple[str, ...] = ()
    control: Any = None
    failure_monitor: Any = None

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files and prints to the terminal."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        return self.world_size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.device}"


def is_launched(launcher: str | None) -> bool:
    """Return whether a launcher other than our `spawn` started this process. `launcher`: from the command line.

    Raises the same as `read_launch`.
    """
    rank = read_launch(os.environ, launcher or "auto")
    return rank is not None and rank.launcher != "spawn"


def read_launch(environment: Environment, launcher: str = "auto") -> Rank | None:
    """Determine this process' `Rank`, except its device; None for a process that runs alone.

    Args:
        launcher: "auto" detects it; a name reads only that launcher's variables.

    Raises:
        UserError: variables are missing, not numbers, or contradict each other.
    """
    if launcher == "none":
        return None
    if launcher in _READERS:
        rank = _READERS[launcher](environment)
        if rank is None and launcher != "spawn":
            raise UserError(
                f"dist.launcher: {launcher}, but its variables are not set: it did not start this process; {ALONE}"
            )
        return rank
    # Under Slurm, srun may start one torchrun or mpirun helper per node, whose variables then take precedence.
    rank = _from_torchrun(environment) or _from_mpi(environment)
    slurm = _from_slurm(environment)
    is_by_hand = rank is not None and rank.parent is None
    if rank and slurm and is_by_hand and (rank.rank != slurm.rank or rank.world_size != slurm.world_size):
        raise UserError(
            f"RANK={rank.rank} and WORLD_SIZE={rank.world_size} contradict SLURM_PROCID={slurm.rank} of "
            f"{slurm.world_size} tasks; unset the former, or choose: --dist.launcher torchrun, --dist.launcher slurm, "
            f"or {ALONE}"
        )
    rank = rank or slurm
    # Variables of a single process say nothing, unless torchrun has started it, which may start it again.
    if rank and rank.is_single_process and (rank.launcher != "torchrun" or rank.parent is None):
        return None
    return rank


def _from_torchrun(environment: Environment) -> Rank | None:
    """torchrun's variables, which `spawn` sets too, and which can be set by hand."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if environment.keys().isdisjoint(names[:3]):
        return None
    on_one_host = {"LOCAL_WORLD_SIZE": environment.get("WORLD_SIZE", "")}
    rank = _place({**on_one_host, **environment}, "torchrun", names)
    if SPAWNED in environment:
        starter = int(environment[SPAWNED])
        return replace(rank, launcher="spawn", launcher_hosts_store=True, parent=starter)
    if "TORCHELASTIC_RUN_ID" not in environment:  # set by hand, in a shell that may end before the run does
        return replace(rank, parent=None)
    return replace(rank, launcher_hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _from_slurm(environment: Environment) -> Rank | None:
    """Return a task of `srun`. A batch job's shell has most of these variables too, but no numeric step id."""
    if not environment.get("SLURM_STEP_ID", "").isdigit() or "SLURM_PROCID" not in environment:
        return None
    tasks = []  # on each node; "2(x3),1": two on each of three nodes, then one
    for count, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        tasks += [count] * int(nodes or 1)
    [node] = _numbers(environment, "slurm", ["SLURM_NODEID"])
    if node < len(tasks):
        environment = {**environment, "LOCAL_WORLD_SIZE": tasks[node]}
    address = "127.0.0.1"
    if len(tasks) != 1:
        # The first of "rack[1-2]n[03-04],login" is rack1n03.
        hosts = re.sub(r"\[(\d+)[^\]]*\]", r"\1", environment.get("SLURM_STEP_NODELIST", ""))
        address = hosts.split(",")[0]
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "LOCAL_WORLD_SIZE")
    of_job = ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job = [environment.get(name, "") for name in of_job]
    return _place(environment, "slurm", names, address, job)


def _from_mpi(environment: Environment) -> Rank | None:
    """Open MPI, MPICH and its derivatives. They only start the processes; torch does the communication."""
    for names in _MPI:
        if names[0] not in environment:
            continue
        if names[3] not in environment and "SLURM_JOB_ID" in environment:
            return None  # Slurm sets the first two of MPICH's variables for its own tasks
        # On one host: the same for all processes of one mpirun, and hardly ever for those of two.
        job = environment.get("PMIX_NAMESPACE") or str(os.getppid())
        return _place(environment, "mpi", names, job=[job])
    return None


def _place(
    environment: Environment,
    launcher: str,
    names: Sequence[str],
    address: str = "127.0.0.1",
    job: Sequence[str] = (),
) -> Rank:
    """Args:
    names: the variables of the rank, the number of processes, the rank on this host, the number of processes there.
    address: of rank 0, if MASTER_ADDR is not set.
    job: identifies this job, to choose a port if MASTER_PORT is not set; the same in all its processes.
    """
    values = dict(environment)
    if values.get(names[1]) == "1":  # then the others may be missing
        alone = {names[0]: "0", names[2]: "0", names[3]: "1", "MASTER_PORT": "0"}
        values = alone | values
    elif job:  # a port below the kernel's ephemeral ones
        port = 10000 + zlib.crc32("/".join(job).encode()) % 20000
        values.setdefault("MASTER_PORT", str(port))
    rank, world_size, local_rank, local_world, port = _numbers(values, launcher, [*names, "MASTER_PORT"])
    if not (0 <= rank < world_size and 0 <= local_rank < local_world):
        raise UserError(
            f"{names[0]}={rank} of {names[1]}={world_size}, or {names[2]}={local_rank} of {names[3]}={local_world}, "
            f"cannot be: ranks begin at 0; {ALONE}"
        )
    return Rank(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        launcher=launcher,
        local_world=local_world,
        address=values.get("MASTER_ADDR", address),
        port=port,
        parent=os.getppid(),
    )


def _numbers(
    environment: Environment,
    launcher: str,
    names: Sequence[str],
) -> list[int]:
    """Read variables that `launcher` sets. Raises `UserError`, with all that are not integers."""
    numbers = []
    wrong = []
    for name in names:
        text = environment.get(name, "")
        if text.lstrip("-").isdigit():
            numbers.append(int(text))
        else:
            wrong.append(f"{name} {text!r}")
    if wrong:
        raise UserError(
            f"{', '.join(wrong)}: with the other variables of {launcher}, this should be an integer; which program "
            "started this process? If it starts one process on each machine (Kubeflow), set LOCAL_RANK=0 and "
            f"LOCAL_WORLD_SIZE=1; {ALONE}"
        )
    return numbers


_READERS = {"spawn": _from_torchrun, "torchrun": _from_torchrun, "mpi": _from_mpi, "slurm": _from_slurm}
