"""The collectives we use. In a single process each function is a no-op, so callers need no check."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.launch import Rank

T = TypeVar("T")


def sum_over_ranks(value: Tensor, rank: Rank) -> Tensor:
    """Sum `value`, a CPU tensor, over all processes, in place; every process gets the result."""
    if not rank.is_single_process:
        dist.all_reduce(value, group=rank.control)
    return value


def max_over_ranks(value: int, rank: Rank) -> int:
    """Return the largest `value` of any process. One small collective."""
    if rank.is_single_process:
        return value
    return LaterMax([value], rank).read()[0]


class LaterMax:
    """The largest values over all processes, by an asynchronous collective: started now, read later."""

    def __init__(self, values: list[int], rank: Rank) -> None:
        self._tensor = torch.tensor(values)
        self._work = dist.all_reduce(
            self._tensor,
            op=dist.ReduceOp.MAX,
            group=rank.control,
            async_op=True,
        )

    def read(self) -> list[int]:
        """Read the maximum of each value. Waits until every process has made its `LaterMax`."""
        self._work.wait()
        return list(self._tensor.tolist())


def gather_objects(value: T, rank: Rank) -> list[T]:
    """Return every process' `value`, in rank order, on every process. For small values: it pickles."""
    if rank.is_single_process:
        return [value]
    values: list[Any] = [None] * rank.world_size
    dist.all_gather_object(values, value, group=rank.control)
    return values


def gather_to_main(value: T, rank: Rank) -> list[T]:
    """Return every process' `value`, in rank order, on the main process only; the others get an empty list."""
    if rank.is_single_process:
        return [value]
    values: list[Any] | None = None
    if rank.is_main:
        values = [None] * rank.world_size
    dist.gather_object(value, values, dst=0, group=rank.control)
    return values or []


def from_main(value: T, rank: Rank) -> T:
    """Return the main process' `value`, on every process. The others should give a small one, such as None."""
    return gather_objects(value, rank)[0]


def barrier(rank: Rank) -> None:
    """Wait for every process."""
    if not rank.is_single_process:
        dist.barrier(group=rank.control)


@contextmanager
def group_hidden() -> Iterator[None]:
    """Run the block as in a single process: code that asks for a process group (torchmetrics) finds none."""
    world = dist.group.WORLD
    dist.group.WORLD = None
    try:
        yield
    finally:
        dist.group.WORLD = world


@contextmanager
def main_first(rank: Rank) -> Iterator[None]:
    """Run the block on rank 0 first, then on all others at once; no rank leaves it before all have finished.

    For files that one process writes and all read: a download, an unpacked archive. Every process must enter it.
    They wait up to a week instead of `dist.timeout`; an error inside, on any rank, ends all of them, as elsewhere.
    """
    if rank.is_single_process:
        yield
        return
    patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    if not rank.is_main:
        dist.barrier(group=patient)
    yield
    if rank.is_main:
        dist.barrier(group=patient)
    dist.barrier(group=patient)
    dist.destroy_process_group(patient)


def is_sharded(value: Any) -> bool:
    """Return whether `value` is a tensor of which each process holds a part (a DTensor)."""
    return isinstance(value, Tensor) and hasattr(value, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This process' part of a sharded tensor, in the same memory; any other tensor unchanged."""
    if is_sharded(tensor):
        return tensor.to_local()  # type: ignore[attr-defined]
    return tensor


def whole(tensor: Any) -> Any:
    """Return a sharded tensor made whole, on every process: a collective; any other tensor unchanged."""
    if not is_sharded(tensor):
        return tensor
    return tensor.detach().to(tensor.device_mesh.device_type).full_tensor()  # parts in host memory: via the device


def norm_over_shards(norm: Tensor, like: Any) -> Tensor:
    """Return the norm of sharded vectors. `norm`: that of this process' part; `like`: one of the vectors."""
    mesh = like.device_mesh
    # Even weights offloaded to host memory are exchanged on the device.
    square = norm.square().to(mesh.device_type)
    dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))  # with several copies: over the processes of one
    return square.sqrt().to(norm.device)
