"""The place of this process among those of the run: one small value, found once and passed on."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from common.base.errors import UserError
from common.distributed.config import DistConfig
from common.distributed.launch import Launch, names, read_launch, was_restarted

_CPU = torch.device("cpu")
GpuIds = int | list[int] | str


@dataclass(frozen=True)
class Rank:
    """This process' place: `rank` of `world_size`, `local_rank` on its host, the device it computes on.

    Attributes:
        backend: what gradients travel by, "nccl" or "gloo"; "" for a single process.
        launch: what the launcher said; None for a single process.
        restarted: the scheduler or launcher has started this very program before, and it was cut off.
        launched_as: names of this launch, the same in every start of it; all of them are known to rank 0 only.
        control: process group on CPU for small exchanges, so that they never wait for the GPU.
        failure_monitor: ends this process when another one fails (`common.failure.monitor`); None before it exists.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = _CPU
    backend: str = ""
    launch: Launch | None = None
    restarted: bool = False
    launched_as: tuple[str, ...] = ()
    control: Any = None
    failure_monitor: Any = None

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files and talks to the terminal."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.device}"


def find_rank(
    gpu_ids: GpuIds, config: DistConfig, environment: Mapping[str, str] = os.environ, program: str = "train.py"
) -> Rank:
    """Work out this process' `Rank` from the launcher's variables and the wanted devices. Starts nothing.

    Args:
        gpu_ids: -1 computes on CPU; otherwise the CUDA device(s) of this host to use, one process each; "all": every
            one that can be seen.
        program: what was started, for the command that a refusal advises.

    Raises:
        UserError: the launcher's variables contradict each other, a device does not exist, or the number of processes
            is not the number of devices asked for.
    """
    launch = read_launch(environment, config.launcher)
    restarted, launched_as = was_restarted(environment, launch), names(environment, launch)
    if launch is None:
        if config.launcher == "none" and config.processes not in (None, 1):
            raise UserError(
                f"dist.processes: {config.processes}, but dist.launcher: none means a single process; "
                "--dist.launcher spawn starts them, whatever the environment says"
            )
        return Rank(device=_device(gpu_ids, None, environment, program), restarted=restarted, launched_as=launched_as)
    if config.processes not in (None, launch.local_world):
        raise UserError(
            f"dist.processes: {config.processes}, but {launch.launcher} started {launch.local_world} on this host; "
            "the launcher decides: leave it out, or --dist.processes null"
        )
    device = _device(gpu_ids, launch, environment, program)
    return Rank(
        launch.rank,
        launch.local_rank,
        launch.world_size,
        device,
        backend="" if launch.world_size == 1 else _backend(config, device),
        launch=launch,
        restarted=restarted,
        launched_as=launched_as,
    )


def processes_wanted(gpu_ids: GpuIds, config: DistConfig, program: str) -> int:
    """How many processes this host should have. Raises `UserError` when `dist.processes` contradicts the devices."""
    devices = wanted_devices(gpu_ids)
    if devices == [-1]:
        return config.processes or 1
    _check_exist(devices, None, program)
    if config.processes not in (None, len(devices)):
        raise UserError(
            f"dist.processes: {config.processes}, but gpu_ids {gpu_ids} names {len(devices)} device(s), and each needs "
            "a process of its own; leave dist.processes out"
        )
    return len(devices)


def wanted_devices(gpu_ids: GpuIds) -> list[int]:
    """Numbers of CUDA devices, [-1] for the CPU. Raises `UserError` for what is neither, and for missing devices."""
    if gpu_ids == "all":
        gpu_ids = list(range(torch.cuda.device_count()))
        if not gpu_ids:
            raise UserError("gpu_ids: all asks for CUDA, but PyTorch sees none here; use --gpu_ids -1 for the CPU")
    wanted = gpu_ids if isinstance(gpu_ids, list) else [gpu_ids]
    if wanted == [-1]:
        return [-1]
    numbers = [number for number in wanted if isinstance(number, int) and number >= 0]
    if not wanted or len(set(numbers)) < len(wanted):
        raise UserError(f'gpu_ids: {gpu_ids} is neither -1 (CPU), "all", nor a list of different device numbers')
    return numbers


def _device(gpu_ids: GpuIds, launch: Launch | None, environment: Mapping[str, str], program: str) -> torch.device:
    local_rank, local_world = (0, 1) if launch is None else (launch.local_rank, launch.local_world)
    wanted = wanted_devices(gpu_ids)
    if wanted == [-1]:
        return _CPU
    count = torch.cuda.device_count()
    if count == 1 and local_world > 1 and "SLURM_JOB_ID" in environment and len(wanted) in (1, local_world):
        # Each task was given one GPU of its own, and sees it as number 0; if not, NCCL refuses: duplicate GPU.
        return torch.device("cuda", 0)
    _check_exist(wanted, launch, program)
    if len(wanted) != local_world:
        said = f"gpu_ids: {_ids(wanted)} is {len(wanted)} device(s), but {local_world} process(es) were started here"
        # Several devices and no launcher: `spawn` would have started processes, had it been allowed to.
        advice = _advice(wanted, launch, program if launch is not None else f"{program} --dist.launcher auto")
        if local_world > count:
            raise UserError(f"{said}, where {count} can be seen; start one per device:{advice}")
        keep = f"\n  or keep the {local_world} process(es) and name their devices: --gpu_ids {_ids(range(local_world))}"
        raise UserError(f"{said}; there must be one per device:{advice}{keep}")
    return torch.device("cuda", wanted[local_rank])


def _check_exist(devices: list[int], launch: Launch | None, program: str) -> None:
    if not torch.cuda.is_available():
        raise UserError(
            f"gpu_ids: {_ids(devices)} asks for CUDA, but PyTorch sees none here; use --gpu_ids -1 for the CPU"
        )
    count = torch.cuda.device_count()
    if max(devices) >= count:
        there = list(range(min(count, len(devices))))
        raise UserError(
            f"gpu_ids: {_ids(devices)} asks for device {max(devices)}, but there are {count} (0 to {count - 1}):"
            f"{_advice(there, launch, program)}"
        )


def _advice(devices: list[int], launch: Launch | None, program: str) -> str:
    """How to start one process for each of `devices`, on as many hosts as now: a line for each way, indented."""
    call, count = f"{program} --gpu_ids {_ids(devices)} ...", len(devices)
    hosts = 1 if launch is None else -(-launch.world_size // launch.local_world)
    by_itself = f"python {call}    (starts its processes itself)" if count > 1 else f"python {call}"
    ways = {
        "torchrun": [
            f"torchrun {f'--nnodes={hosts} ...' if hosts > 1 else '--standalone'} --nproc-per-node={count} {call}"
        ],
        "mpi": [f"mpirun -n {count * hosts} python {call}"],
        "slurm": [f"srun --nodes={hosts} --ntasks-per-node={count} --gpus-per-node={count} python {call}"],
    }
    lines = ways.get("" if launch is None else launch.launcher, [])
    if launch is not None and launch.launcher == "slurm" and program == "train.py":
        lines.append(f"sh scripts/slurm.sh --slurm.nodes {hosts} --slurm.gpus {count} --config ...    (queues it)")
    elif hosts == 1:
        lines.append(by_itself)
    return "".join(f"\n  {line}" for line in lines)


def _ids(devices: Iterable[int]) -> str:
    return ",".join(map(str, devices))


def _backend(config: DistConfig, device: torch.device) -> str:
    backend = config.distributed_backend
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type == "cpu":
        raise UserError("dist.distributed_backend: nccl needs CUDA devices; use gloo or auto with --gpu_ids -1")
    return backend
