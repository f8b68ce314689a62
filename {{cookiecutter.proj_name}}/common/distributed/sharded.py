"""Tensors that are sharded over processes. Recognized without importing DTensor, which takes 0.6 s."""

from typing import Any

import torch.distributed as dist
from torch import Tensor


def is_sharded(value: Any) -> bool:
    """Return whether `value` is a tensor of which each process holds a part (a DTensor)."""
    return isinstance(value, Tensor) and hasattr(value, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This process' part of a sharded tensor, in the same memory; any other tensor unchanged."""
    if is_sharded(tensor):
        return tensor.to_local()  # type: ignore[attr-defined]
    return tensor


def norm_over_shards(norm: Tensor, like: Any) -> Tensor:
    """Return the norm of sharded vectors. `norm`: that of this process' part; `like`: one of the vectors."""
    mesh = like.device_mesh
    # Even weights offloaded to host memory are exchanged on the device.
    square = norm.square().to(mesh.device_type)
    dist.all_reduce(square, group=mesh.get_group(mesh.ndim - 1))  # with several copies: over the processes of one
    return square.sqrt().to(norm.device)
