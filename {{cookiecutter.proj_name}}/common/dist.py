"""Who am I among the processes of this run? One small value, found once and passed in, and the few collectives we need.

Every collective here is a no-op in a single process, so that nobody else has to ask.
"""

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from common.config import section
from common.errors import UserError

T = TypeVar("T")
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@section
class DistConfig:
    """Processes and randomness."""

    random_seed: Annotated[
        int | None, Field(ge=0, lt=2**63, description="seed of everything; null: one is drawn and recorded")
    ] = 42
    deterministic: Annotated[
        Literal["off", "warn", "strict"],
        Field(description="strict: an operator without a deterministic version is an error; warn: it is named"),
    ] = "off"
    distributed_backend: Annotated[
        Literal["auto", "nccl", "gloo"], Field(description="auto: nccl on CUDA, gloo on CPU")
    ] = "auto"
    timeout: Annotated[int, Field(ge=1, description="seconds a collective may wait for the other processes")] = 600
    strategy: Annotated[
        Literal["ddp", "fsdp"],
        Field(description="ddp: each process holds the whole model; fsdp: a part of it, see prepare.fsdp"),
    ] = "ddp"
    find_unused_parameters: Annotated[bool, Field(description="DDP: allow parameters that get no gradient")] = False
    static_graph: Annotated[bool, Field(description="DDP: promise that the graph never changes")] = False
    bucket_mb: Annotated[float, Field(gt=0, description="DDP: megabytes of gradients that are exchanged together")] = (
        25.0
    )
    gradient_as_bucket_view: Annotated[
        bool, Field(description="DDP: gradients lie in the memory they are exchanged from, which saves a copy")
    ] = True
    broadcast_buffers: Annotated[
        bool, Field(description="all processes train with the buffers (batch norm statistics) of the first")
    ] = True
    sync_bn: Annotated[bool, Field(description="batch norm statistics over all processes (CUDA only)")] = False


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rank:
    """This process' place: `rank` of `world_size`, `local_rank` on its host, the device it computes on."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = _CPU
    control: Any = None  # process group on CPU for the small exchanges below, so that they never wait for the GPU

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files and talks to the terminal."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.device}"


def find_rank(gpu_ids: int | list[int], environment: Mapping[str, str] = os.environ) -> Rank:
    """Work out this process' `Rank` from the launcher's variables and the wanted devices. Starts nothing.

    Args:
        gpu_ids: -1 computes on CPU; otherwise the CUDA device(s) this host may use, one process each.

    Raises:
        UserError: variables of the launcher are incomplete, a device does not exist, or the number of processes
            is not the number of devices asked for.
    """
    found = [name for name in _VARIABLES if name in environment]
    if "RANK" not in found and "WORLD_SIZE" not in found:
        return Rank(device=_device(gpu_ids, local_rank=0, local_world=1))
    if len(found) < len(_VARIABLES):
        missing = ", ".join(name for name in _VARIABLES if name not in found)
        raise UserError(f"started by a launcher that sets {', '.join(found)} but not {missing}; use torchrun")
    rank, world_size, local_rank = (int(environment[name]) for name in _VARIABLES[:3])
    if not 0 <= rank < world_size:
        raise UserError(f"RANK={rank} is outside WORLD_SIZE={world_size}")
    local_world = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    return Rank(rank, local_rank, world_size, _device(gpu_ids, local_rank, local_world))


def _device(gpu_ids: int | list[int], local_rank: int, local_world: int) -> torch.device:
    wanted = gpu_ids if isinstance(gpu_ids, list) else [gpu_ids]
    if wanted == [-1]:
        return torch.device("cpu")
    if not wanted or min(wanted) < 0 or len(set(wanted)) < len(wanted):
        raise UserError(f"gpu_ids: {gpu_ids} is neither -1 (CPU) nor a list of different device numbers")
    if not torch.cuda.is_available():
        raise UserError(f"gpu_ids: {gpu_ids} asks for CUDA, but PyTorch sees none here; use --gpu_ids -1 for the CPU")
    count = torch.cuda.device_count()
    if max(wanted) >= count:
        raise UserError(f"gpu_ids: {gpu_ids} asks for device {max(wanted)}, but there are {count} (0 to {count - 1})")
    if len(wanted) != local_world:
        ids = ",".join(map(str, wanted))
        raise UserError(
            f"gpu_ids: {len(wanted)} devices for {local_world} process(es) on this host; start one for each device:\n"
            f"  torchrun --standalone --nproc-per-node={len(wanted)} train.py --gpu_ids {ids} ..."
        )
    return torch.device("cuda", wanted[local_rank])


def start(rank: Rank, config: DistConfig) -> Rank:
    """Set the device, then join the process groups; a single process joins none. Returns the rank to work with."""
    if rank.device.type == "cuda":
        torch.cuda.set_device(rank.device)
    if rank.is_alone:
        return rank
    backend = config.distributed_backend
    if backend == "auto":
        backend = "nccl" if rank.device.type == "cuda" else "gloo"
    if backend == "nccl" and rank.device.type == "cpu":
        raise UserError("dist.distributed_backend: nccl needs CUDA devices; use gloo or auto with --gpu_ids -1")
    timeout = timedelta(seconds=config.timeout)
    dist.init_process_group(backend, rank=rank.rank, world_size=rank.world_size, timeout=timeout)
    return replace(rank, control=dist.new_group(backend="gloo", timeout=timeout))


def finish(rank: Rank) -> None:
    """Leave the process group after success. Never call this on the way out of an error: it waits for the others."""
    if rank.is_alone:
        return
    dist.barrier(group=rank.control)
    dist.destroy_process_group()
    # gloo's threads may still hold Python objects: freeing them now keeps them from doing so while Python shuts down,
    # which aborted about one run in four.
    gc.collect()


def sum_over_ranks(value: Tensor, rank: Rank) -> Tensor:
    """Sum `value`, a CPU tensor, over all processes, in place; every process gets the result."""
    if not rank.is_alone:
        dist.all_reduce(value, group=rank.control)
    return value


def max_over_ranks(value: int, rank: Rank) -> int:
    """The largest `value` of any process. One small collective."""
    if rank.is_alone:
        return value
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=rank.control)
    return int(tensor.item())


def gather_objects(value: T, rank: Rank) -> list[T]:
    """Every process' `value`, in rank order, on every process. For small things: it pickles."""
    if rank.is_alone:
        return [value]
    values: list[Any] = [None] * rank.world_size
    dist.all_gather_object(values, value, group=rank.control)
    return values


def from_main(value: T, rank: Rank) -> T:
    """The main process' `value`, on every process."""
    if rank.is_alone:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, group=rank.control)
    return box[0]


def barrier(rank: Rank) -> None:
    """Wait for every process."""
    if not rank.is_alone:
        dist.barrier(group=rank.control)


def share_buffers(model: nn.Module, rank: Rank) -> None:
    """Give every process rank 0's buffers: batch norm statistics drift apart, since each process sees other samples."""
    if rank.is_alone:
        return
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        kinds.setdefault(buffer.dtype, []).append(buffer)
    for buffers in kinds.values():  # one exchange each, not one a buffer
        values = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        dist.broadcast(values, src=0)
        for buffer, value in zip(buffers, values.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.detach().copy_(value.view_as(buffer))
