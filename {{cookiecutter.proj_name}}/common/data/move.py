"""Moving batches of any nesting between devices and precisions."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")


def map_tensors(batch: Any, function: Callable[[Tensor], Any], method: str = "", *arguments: Any) -> Any:
    """Apply `function` to every tensor in mappings, lists, tuples, named tuples, dataclasses and objects with `to`.

    These are copied, with whatever else they hold; the rest is unchanged. Any object but a tensor that has `method` is
    replaced by what `method(*arguments)` returns.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if method and callable(own := getattr(batch, method, None)):
        return own(*arguments)
    if isinstance(batch, (list, tuple)):
        values = [map_tensors(value, function, method, *arguments) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(value, function, method, *arguments) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return items
        copied: Any = copy.copy(batch)  # keeps attributes of a subclass
        for key, value in items.items():  # not `update`, which some classes refuse
            copied[key] = value
        return copied
    if isinstance(batch, type) or not (dataclasses.is_dataclass(batch) or hasattr(batch, "to")):
        return batch
    fields = dataclasses.fields(batch) if dataclasses.is_dataclass(batch) else ()
    copied = copy.copy(batch)  # not `dataclasses.replace`, which leaves out fields that `__init__` does not take
    for name in [field.name for field in fields] or list(getattr(batch, "__dict__", {})):
        if hasattr(batch, name):
            object.__setattr__(copied, name, map_tensors(getattr(batch, name), function, method, *arguments))
    return copied


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of `batch` to `device`; to CUDA asynchronously from pinned memory.

    Loaded batches are on the CPU.
    """
    if device == _CPU:  # a fifth of the time of comparing device.type, in every step
        return batch
    on_cuda = device.type == "cuda"  # an asynchronous copy to an Apple GPU may read memory that has been reused
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=on_cuda), "to", device)


class Loaded:
    """A batch as a loader returns it. Pinning skips tensors that are on a GPU."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def pin_memory(self) -> "Loaded":
        pinned = map_tensors(
            self.batch, lambda tensor: tensor.pin_memory() if tensor.device == _CPU else tensor, "pin_memory"
        )
        return Loaded(pinned)
