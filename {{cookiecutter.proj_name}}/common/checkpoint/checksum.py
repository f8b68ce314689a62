"""Checksums of tensors and states: whether ranks hold the same, and whether a tensor is what it was."""

import zlib
from typing import Any

import torch
from torch import Tensor

from common.base.nested import map_leaves
from common.distributed.collectives import is_sharded
from common.distributed.seed import mix


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the bits of a tensor and of its shape. Copies it to the CPU."""
    values = tensor.detach().cpu().resolve_conj().contiguous()
    bits = values.reshape(-1).view(torch.uint8)
    return zlib.crc32(bits.numpy().data, zlib.crc32(repr(values.shape).encode()))


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
