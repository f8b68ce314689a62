"""Moving batches of any nesting between devices and precisions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply `function` to every tensor in dicts, lists, tuples, named tuples and dataclasses; the rest stays."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return type(batch)((key, map_tensors(value, function)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_tensors(value, function) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: map_tensors(getattr(batch, f.name), function) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **values)
    return batch


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of `batch` to `device`; asynchronous from pinned memory. Loaded batches are on the CPU."""
    if device == _CPU:  # a fifth of the time of asking for its type, in every step
        return batch
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def batch_length(batch: Any) -> int:
    """Samples in a batch: the first dimension of the first tensor found."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    for value in values:
        if isinstance(value, (Tensor, dict, list, tuple)) and (length := batch_length(value)):
            return length
    return 0
