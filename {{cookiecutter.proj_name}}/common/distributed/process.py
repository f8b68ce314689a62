"""Settings of a process, made before it computes anything."""

import os
from collections.abc import Mapping

import torch

from common.base.process import available_cores
from common.distributed import DistConfig, Rank, has_streams


def set_up_process(config: DistConfig, rank: Rank) -> None:
    """Set the device, determinism, cuDNN and threads, from the config and the number of processes."""
    if config.deterministic != "off":
        # cuBLAS reads this when it starts, so it must be set before the first CUDA call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=config.deterministic == "warn")
    if has_streams(rank.device):
        torch.accelerator.set_device_index(rank.device)  # what waits, draws or counts memory means this one
    torch.backends.cudnn.benchmark = config.cudnn_benchmark and config.deterministic == "off"
    if config.is_fixed and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the last bits of a sum depend on this number, which no other may decide
    elif "OMP_NUM_THREADS" not in os.environ:
        set_threads(rank)


def set_threads(rank: Rank) -> None:
    """Let each of several processes have as many threads as it has cores; PyTorch would start one for each core of the
    host. A process alone has PyTorch's number, one for each physical core, but not more than its CPU quota."""
    if not rank.is_single_process:
        torch.set_num_threads(cores(rank.local_world, os.environ))
    elif available_cores() < torch.get_num_threads():
        torch.set_num_threads(available_cores())


def cores(local_world: int, environment: Mapping[str, str]) -> int:
    """Cores for each process on this host: Slurm's allocation per task if set, else an equal share."""
    promised = environment.get("SLURM_CPUS_PER_TASK", "")
    return int(promised) if promised.isdigit() else max(1, available_cores() // local_world)
