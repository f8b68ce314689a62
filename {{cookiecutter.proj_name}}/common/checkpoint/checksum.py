"""Checksums of tensors and states: whether ranks hold the same, and whether a tensor is what it was."""

import zlib
from collections.abc import Mapping
from functools import cache
from hashlib import sha256, shake_128
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
    value = value.float() if value.is_floating_point() else value
    flat = value.contiguous().reshape(-1).view(torch.uint8)
    words = (pad(flat, (0, -len(flat) % 4)) if len(flat) % 4 else flat).view(torch.int32)
    factors = _factors(value.device)
    # In 64 bits: in 32, two changed signs would cancel each other.
    parts = [(chunk * factors[: len(chunk)]).sum() for chunk in words.split(_CHUNK)]
    return mix(*value.shape, *torch.stack(parts).tolist())


@cache
def _factors(device: torch.device) -> Tensor:
    """Random numbers that no version of PyTorch or NumPy changes, since checksums are stored."""
    return torch.frombuffer(bytearray(shake_128(b"").digest(8 * _CHUNK)), dtype=torch.int64).to(device)


def state_checksum(state: Any) -> int:
    """Return the checksum of nested dicts, lists and tuples of tensors and plain values.

    Sharded tensors, of which each rank holds another part, do not count.
    """
    numbers = [0]

    def add(value: Any, path: tuple[Any, ...]) -> None:
        if not is_sharded(value):
            number = checksum(value) if isinstance(value, Tensor) else zlib.crc32(repr(value).encode())
            numbers.append(mix(zlib.crc32(repr(path).encode()), number))

    map_leaves(state, add)
    return mix(*numbers)


def weights_digest(state: Mapping[str, Any]) -> str:
    """SHA-256 of what was trained: `model`, `task` and `ema` of a checkpoint's state, in their order.

    All tensors count, with names, types and shapes, and what modules return in `get_extra_state`; of the average, its
    tensors alone. 64 hexadecimal digits; a CPU with instructions for it digests 1 GB/s.
    """
    digest = sha256()

    def add(value: Any, path: tuple[Any, ...]) -> None:
        if isinstance(value, Tensor):
            digest.update(repr((path, str(value.dtype), tuple(value.shape))).encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif path[0] != "ema" and value is not path[-1]:  # which are the keys
            digest.update(repr((path, value)).encode())

    map_leaves({name: state.get(name) for name in ("model", "task", "ema")}, add)
    return digest.hexdigest()
