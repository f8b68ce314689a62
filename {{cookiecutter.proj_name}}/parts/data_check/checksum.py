"""Checksums of samples: the same for equal ones, in any process and wherever a folder lies."""

import os
import re
from collections import deque
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.config.problem import join_names

_DEPTH = 20  # of nested values

Sums = dict[str, str]  # checksums of a sample, by entry


def sums(sample: Any) -> Sums:
    """Return the checksums of a sample, or of a batch."""
    if isinstance(sample, Mapping):
        return {str(name): _checksum(value) for name, value in sample.items()}
    if isinstance(sample, (list, tuple)):
        return {f"[{number}]": _checksum(value) for number, value in enumerate(sample)}
    return {"the sample": _checksum(sample)}


def different(first: Sums, second: Sums) -> str:
    """Name the entries that differ."""
    names = []
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            names.append(f"`{name}`")
    return join_names(names, 3)


def _checksum(value: Any) -> str:
    content = blake2b(digest_size=8)
    _add(content, value, ())
    return content.hexdigest()


def _add(
    content: Any,
    value: Any,
    above: tuple[int, ...],
) -> None:
    """Add a value to a checksum. It is inside of other objects, `above`."""
    if isinstance(value, Tensor):
        dense = value.detach().to_dense().cpu().resolve_conj().contiguous()
        content.update(f"{dense.dtype} {tuple(dense.shape)}".encode())
        content.update(dense.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        content.update(f"{value.dtype} {value.shape}".encode())
        content.update(value.tobytes())
    elif isinstance(value, (bytes, bytearray)):
        content.update(value)
    elif isinstance(value, (str, os.PathLike)):
        text = os.fsdecode(value)
        if os.path.isabs(text):
            text = os.path.basename(text)
        content.update(os.fsencode(text))
    else:
        parts = _parts(value)
        if not parts or id(value) in above or len(above) == _DEPTH:
            content.update(re.sub(r" at 0x\w+", "", repr(value)).encode())
            return
        content.update(type(value).__name__.encode())
        for part in parts:
            _add(content, part, (*above, id(value)))


def _parts(value: Any) -> list[Any]:
    """Return what an object consists of; empty if it has no parts."""
    if isinstance(value, Mapping):
        parts: list[Any] = []
        for item in value.items():
            parts += item
        return parts
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, np.ndarray) and value.ndim:  # of objects
        return value.tolist()
    if hasattr(type(value), "__array_interface__") or hasattr(type(value), "__array__"):  # a picture, a table
        return [np.asarray(value)]
    if isinstance(value, (list, tuple, range, deque)):
        return list(value)
    if getattr(value, "__dict__", None):
        return [vars(value)]
    return []
