"""The few exchanges between processes that we need. In a single process each does nothing, so nobody has to ask."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.distributed.config import DistConfig
from common.distributed.rank import Rank
from common.errors import UserError

T = TypeVar("T")


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


def gather_to_main(value: T, rank: Rank) -> list[T]:
    """Every process' `value`, in rank order, on the main process alone; the others get an empty list."""
    if rank.is_alone:
        return [value]
    values: list[Any] = [None] * rank.world_size if rank.is_main else []
    dist.gather_object(value, values if rank.is_main else None, dst=0, group=rank.control)
    return values


def gather_tensors(value: Tensor, rank: Rank) -> list[Tensor]:
    """Every process' CPU tensor, of any shape, in rank order, on the main process alone; the others get an empty list.

    For large ones, where pickling takes six times as long and four times the memory.
    """
    if rank.is_alone:
        return [value]
    about = gather_objects((value.shape, value.dtype), rank)
    if not rank.is_main:
        if value.numel():
            dist.send(value.contiguous(), dst=0, group=rank.control)
        return []
    values = [value, *(torch.empty(shape, dtype=dtype) for shape, dtype in about[1:])]
    for source, received in enumerate(values):
        if source and received.numel():
            dist.recv(received, src=source, group=rank.control)
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
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def wrap(model: nn.Module, config: DistConfig, rank: Rank) -> nn.Module:
    """Make `model`, already on its device, exchange gradients with the other processes; alone, it stays as it is."""
    if rank.is_alone:
        return model
    on_gpu = rank.device.type == "cuda"
    if config.sync_bn:
        if not on_gpu:
            raise UserError("dist.sync_bn: PyTorch synchronises batch norm on CUDA only")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return DistributedDataParallel(
        model,
        device_ids=[rank.device.index] if on_gpu else None,
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=True,
    )
