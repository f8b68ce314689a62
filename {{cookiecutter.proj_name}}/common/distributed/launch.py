"""The place of this process, from the variables of its launcher: torchrun, Slurm, MPI, or our own `spawn`."""

import os
import re
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from common.base.errors import UserError
from common.distributed.hosts import expand_hosts

_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_MPI = (  # rank, number of processes, rank on this host, number of processes there
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
SPAWNED = "TRAIN_SPAWNED"  # set by `spawn` for the processes it starts: its own process id

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Launch:
    """One process among those that were started together.

    Attributes:
        local_world: processes on this process' host.
        address, port: where the processes find each other.
        served: the launcher itself listens there; otherwise rank 0 does.
        lives: the process that started this one lives as long as the run, unlike a shell in which variables were set.
        starter: the process that started this one, where that was our own `spawn`.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world: int
    address: str
    port: int
    served: bool = False
    lives: bool = True
    starter: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or not 0 <= self.local_rank < self.local_world:
            raise UserError(
                f"{self.launcher} says this is process {self.rank} of {self.world_size}, and {self.local_rank} of "
                f"{self.local_world} on its host, which cannot be; are variables of another job left over?"
            )


def is_launched(launcher: str | None, environment: Environment = os.environ) -> bool:
    """Whether a launcher that is not our own has started this process. `launcher`: what the command line says, if so.

    Raises as `read_launch`.
    """
    launch = read_launch(environment, launcher if launcher in _READERS else "auto")
    return launcher != "none" and launch is not None and launch.launcher != "spawn"


def read_launch(environment: Environment, launcher: str = "auto") -> Launch | None:
    """Find this process' place; None for a process that stands alone.

    Args:
        launcher: "auto" detects it; a name takes the variables of that launcher only.

    Raises:
        UserError: variables are missing or contradict each other.
    """
    if launcher == "none":
        return None
    if launcher != "auto":
        found = _READERS[launcher](environment)
        if found is None and launcher != "spawn":
            raise UserError(f"dist.launcher: {launcher}, but its variables are not set: it did not start this process")
        return found
    _check_by_hand(environment)
    # Under Slurm, torchrun and mpirun start one helper per node by srun, and it starts the processes: theirs count.
    for reader in (_from_torchrun, _from_mpi, _from_slurm):
        found = reader(environment)
        if found is not None:
            return found if found.world_size > 1 or found.launcher == "torchrun" else None
    return None


def _check_by_hand(environment: Environment) -> None:
    """Refuse variables of torchrun that were set by hand and contradict those of Slurm."""
    slurm = _slurm_place(environment)
    if slurm is None or not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return
    by_hand = not any(name in environment for name in ("TORCHELASTIC_RUN_ID", SPAWNED))
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if by_hand and slurm != (rank, world_size):
        raise UserError(
            f"RANK={rank} and WORLD_SIZE={world_size} contradict SLURM_PROCID={slurm[0]} of {slurm[1]} tasks; unset "
            "the former, or choose with --dist.launcher torchrun or --dist.launcher slurm"
        )


def was_restarted(environment: Environment, launch: Launch | None) -> bool:
    """Whether Slurm starts this very job again, or torchrun a single process. Of several, see `group.start`."""
    by_torchrun = (
        launch is not None and launch.world_size == 1 and _number(environment, "TORCHELASTIC_RESTART_COUNT", 0)
    )
    return bool(by_torchrun) or _number(environment, "SLURM_RESTART_COUNT", 0) > 0


def names(environment: Environment, launch: Launch | None) -> tuple[str, ...]:
    """Names of this launch, the same in every start of it. For several processes, see also `group.start`."""
    found = [f"job {environment['SLURM_JOB_ID']}"] if "SLURM_JOB_ID" in environment else []
    if launch is not None and launch.world_size == 1 and "TORCHELASTIC_RUN_ID" in environment:
        found.append(f"torchrun {environment['TORCHELASTIC_RUN_ID']} by process {os.getppid()}")
    return tuple(found)


def _from_torchrun(environment: Environment) -> Launch | None:
    """The variables of torchrun, which `spawn` sets too, and which can be set by hand."""
    found = [name for name in _TORCH if name in environment]
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(found):
        return None
    if len(found) < len(_TORCH):
        missing = ", ".join(name for name in _TORCH if name not in found)
        raise UserError(
            f"the variables {', '.join(found)} are set, but not {missing}; start with torchrun, which sets all of "
            "them, or unset them for a single process"
        )
    rank, world_size, local_rank = (_number(environment, name) for name in _TORCH[:3])
    return Launch(
        "spawn" if SPAWNED in environment else "torchrun",
        rank,
        local_rank,
        world_size,
        _number(environment, "LOCAL_WORLD_SIZE", world_size),
        environment["MASTER_ADDR"],
        _given_port(environment),
        served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        lives="TORCHELASTIC_RUN_ID" in environment or SPAWNED in environment,
        starter=_number(environment, SPAWNED) if SPAWNED in environment else None,
    )


def _from_slurm(environment: Environment) -> Launch | None:
    """A task of `srun`. The shell of a batch job has most of these variables too, but not those of a step."""
    place = _slurm_place(environment)
    if place is None:
        return None
    rank, world_size = place
    local_world = _slurm_local_world(environment, world_size)
    keys = ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Launch(
        "slurm",
        rank,
        _number(environment, "SLURM_LOCALID"),
        world_size,
        local_world,
        # Where all tasks share a host, none needs its name.
        environment.get("MASTER_ADDR") or ("127.0.0.1" if local_world == world_size else _first_host(environment)),
        _given_port(environment, _port(*(environment.get(key, "") for key in keys))),
    )


def _slurm_place(environment: Environment) -> tuple[int, int] | None:
    """Rank and number of tasks in a step of srun; None elsewhere."""
    if not environment.get("SLURM_STEP_ID", "").isdigit() or "SLURM_PROCID" not in environment:
        return None
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    return _number(environment, "SLURM_PROCID"), int(tasks)


def _slurm_local_world(environment: Environment, world_size: int) -> int:
    """Tasks on this node, from a list such as "2(x3),1": two on each of three nodes, then one."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", str(world_size))
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError(f"Slurm's number of tasks per node cannot be read: {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environment, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else counts[-1]


def _first_host(environment: Environment) -> str:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError("Slurm did not say on which nodes the job runs; set MASTER_ADDR to the first one's name")
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return expand_hosts(nodes)[0]  # not every compute node has scontrol


def _from_mpi(environment: Environment) -> Launch | None:
    """Open MPI, MPICH and its relatives. They only start the processes, which talk by torch's own means."""
    names = next((names for names in _MPI if names[0] in environment), None)
    # Slurm sets the first two of MPICH's for tasks of its own.
    if names is None or (names[3] not in environment and "SLURM_JOB_ID" in environment):
        return None
    rank, world_size, local_rank, local_world = (_number(environment, name) for name in names)
    one_host = local_world == world_size
    # The same for the processes of one mpirun, and hardly ever for those of two.
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    if not job and one_host:
        job = str(os.getppid())
    if not one_host and ("MASTER_ADDR" not in environment or not (job or "MASTER_PORT" in environment)):
        raise UserError(
            "mpirun over several hosts does not say where rank 0 is; set it for all processes:\n"
            "  mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 ...    (Open MPI; the first host's name)\n"
            "  mpiexec -genv MASTER_ADDR $(hostname) -genv MASTER_PORT 29500 ...    (MPICH)"
        )
    return Launch(
        "mpi",
        rank,
        local_rank,
        world_size,
        local_world,
        environment.get("MASTER_ADDR", "127.0.0.1"),
        _given_port(environment, _port(job)),
    )


def _port(*job: str) -> int:
    """The port of a job, the same in all its processes; below those that the kernel hands out."""
    return 10000 + zlib.crc32("/".join(job).encode()) % 20000


def _given_port(environment: Environment, default: int | None = None) -> int:
    port = _number(environment, "MASTER_PORT", default)
    if not 0 < port < 1 << 16:
        raise UserError(f"MASTER_PORT: {port} is no port; it must be from 1 to 65535")
    return port


def _number(environment: Environment, name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.lstrip("-").isdigit():
        found = f"not {text!r}" if text else "but it is not set"
        raise UserError(f"the variable {name} should be a whole number, {found}; which program started this process?")
    return int(text)


_READERS = {"spawn": _from_torchrun, "torchrun": _from_torchrun, "mpi": _from_mpi, "slurm": _from_slurm}
