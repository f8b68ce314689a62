"""Checksums of tensors and states: whether ranks hold the same, and whether a tensor is what it was."""

import zlib
from functools import cache
from hashlib import shake_128
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from common.base.nested import map_leaves
from common.distributed.collectives import is_sharded
from common.distributed.seed import mix

_CHUNK = 1 << 16  # numbers multiplied at a time: these products stay in the cache of a CPU


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """64 bits that depend on every bit of a tensor and on where it is, computed on its device, the same on any.

    A CPU checks 0.7 GB/s. Floating point numbers count in 32 bits, so a model has the same one in any precision.
    """
    value = tensor.detach()
    if value.is_floating_point():
        value = value.float()
    data = value.contiguous().reshape(-1).view(torch.uint8)
    if len(data) % 4:
        data = pad(data, (0, -len(data) % 4))
    factors = _factors(value.device)
    sums = []
    for words in data.view(torch.int32).split(_CHUNK):
        sums.append((words * factors[: len(words)]).sum())  # in 64 bits: in 32, two changed signs cancel each other
    return mix(*value.shape, *torch.stack(sums).tolist())


@cache
def _factors(device: torch.device) -> Tensor:
    """Random numbers that no version of PyTorch or NumPy changes, since checksums are stored."""
    data = bytearray(shake_128(b"").digest(8 * _CHUNK))
    return torch.frombuffer(data, dtype=torch.int64).to(device)


def state_checksum(state: Any) -> int:
    """Return the checksum of nested dicts, lists and tuples of tensors and plain values.

    Sharded tensors, of which each rank holds another part, do not count.
    """
    numbers = [0]

    def add(value: Any, path: tuple[Any, ...]) -> None:
        if is_sharded(value):
            return
        if isinstance(value, Tensor):
            value = checksum(value)
        numbers.append(zlib.crc32(repr((path, value)).encode()))

    map_leaves(state, add)
    return mix(*numbers)
