"""This process' rank, the device it computes on, and what is set before it computes anything."""

import os
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from common.base.errors import UserError
from common.base.process import available_cores
from common.distributed.config import DistConfig
from common.distributed.launch import Rank, read_launch

GpuIds = int | list[int] | str


def has_streams(device: torch.device) -> bool:
    """Return whether a device runs its work later than the call, copies from page-locked memory, and counts its memory.

    Every accelerator does but an Apple GPU: an asynchronous copy to that one may read memory that has been reused.
    """
    return device.type not in ("cpu", "mps")


def find_rank(
    gpu_ids: GpuIds,
    config: DistConfig,
    environment: Mapping[str, str] = os.environ,
) -> Rank:
    """Determine this process' `Rank` from the launcher's variables and the requested devices. Starts nothing.

    Args:
        gpu_ids: -1 computes on CPU; otherwise the GPU(s) of this host to use, one process each; "all": every
            visible one; "mps": the GPU of an Apple computer, which one process uses.

    Raises:
        UserError: the launcher's variables are wrong, a device does not exist, or the number of processes is not the
            number of devices asked for.
    """
    rank = read_launch(environment, config.launcher) or Rank()
    if config.processes not in (None, rank.local_world):
        raise UserError(
            f"dist.processes: {config.processes}, but {rank.launcher} started {rank.local_world} on this host; leave "
            "dist.processes out: only --dist.launcher spawn starts them here"
        )
    device = host_devices(gpu_ids, rank.local_world, rank.launcher)[rank.local_rank]
    backend: str = config.distributed_backend
    if backend == "nccl" and device.type != "cuda":
        raise UserError("dist.distributed_backend: nccl needs CUDA devices; use gloo or auto with --gpu_ids -1")
    if rank.is_single_process:
        backend = ""
    elif backend == "auto":
        backend = dist.get_default_backend_for_device(device)
    launched_as: tuple[str, ...] = ()
    if "SLURM_JOB_ID" in environment:
        launched_as = (f"job {environment['SLURM_JOB_ID']}",)
    return replace(
        rank,
        device=device,
        backend=backend,
        restarted=environment.get("SLURM_RESTART_COUNT", "0") != "0",
        launched_as=launched_as,
    )


def host_devices(
    gpu_ids: GpuIds,
    processes: int | None,
    launcher: str = "",
) -> list[torch.device]:
    """Return the devices of this host's processes, one each.

    Args:
        processes: how many; None: one per GPU, or one on the CPU.

    Raises:
        UserError: a device does not exist, or the number of devices is not `processes`.
    """
    if gpu_ids in (-1, [-1]):
        return [torch.device("cpu")] * (processes or 1)
    kind = "mps"
    if gpu_ids != "mps":
        kind = _numbered_kind()
    count = torch.get_device_module(kind).device_count()
    # Slurm may give each task its own GPU, visible as number 0; if they share one, NCCL fails with a duplicate GPU.
    if launcher == "slurm" and count == 1 and processes is not None and processes > 1:
        return [torch.device(kind, 0)] * processes
    if isinstance(gpu_ids, str):
        numbers = list(range(count))
    elif isinstance(gpu_ids, int):
        numbers = [gpu_ids]
    else:
        numbers = gpu_ids
    distinct = set(numbers)
    if not numbers or len(distinct) < len(numbers) or not distinct.issubset(range(count)):
        raise UserError(
            f"gpu_ids: {gpu_ids}: PyTorch finds {count} {kind.upper()} device(s); name different numbers, from 0, of "
            'those, or "all"; --gpu_ids -1 is the CPU, mps an Apple GPU'
        )
    if processes not in (None, len(numbers)):
        raise UserError(
            f"gpu_ids: {gpu_ids} names {len(numbers)} device(s), but the launcher or dist.processes wants {processes} "
            f"process(es) on this host, and each needs one device: start {len(numbers)}, or name {processes} device(s)"
        )
    return [torch.device(kind, number) for number in numbers]


def _numbered_kind() -> str:
    """Return the kind of device that a number in `gpu_ids` means. An Apple GPU must be asked for by name."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type == "mps":
        return "cuda"
    return found.type


def set_up_process(config: DistConfig, rank: Rank) -> None:
    """Set the device, determinism, cuDNN and threads, from the config and the number of processes.

    PyTorch would start a thread for each core of the host, in each of its processes.
    """
    if config.deterministic != "off":
        # cuBLAS reads this when it starts, so it must be set before the first CUDA call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=config.deterministic == "warn")
    if has_streams(rank.device):
        torch.accelerator.set_device_index(rank.device)  # the default for waits, random draws and memory counts
    torch.backends.cudnn.benchmark = config.cudnn_benchmark and config.deterministic == "off"
    if "OMP_NUM_THREADS" in os.environ:
        return
    if config.is_fixed:
        torch.set_num_threads(1)  # the last bits of a sum depend on this number, which no other may decide
    elif not rank.is_single_process:
        torch.set_num_threads(cores(rank, os.environ))
    elif available_cores() < torch.get_num_threads():  # a CPU quota
        torch.set_num_threads(available_cores())


def cores(rank: Rank, environment: Mapping[str, str]) -> int:
    """Cores for each process on this host: what Slurm gives each task, otherwise an equal share."""
    promised = environment.get("SLURM_CPUS_PER_TASK", "")
    if promised.isdigit() and rank.launcher == "slurm":
        return int(promised)
    return max(1, available_cores() // rank.local_world)
