"""Moving batches of any nesting between devices and precisions."""

from typing import Any

import torch

from common.base.nested import map_tensors
from common.distributed import has_streams

_CPU = torch.device("cpu")


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of `batch` to `device`; from pinned memory asynchronously.

    Loaded batches are on the CPU.
    """
    if device == _CPU:  # a fifth of the time of comparing device.type, in every step
        return batch
    later = has_streams(device)
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=later), "to", device)


class Loaded:
    """A batch as a loader returns it. Pinning skips tensors that are on a GPU."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def pin_memory(self) -> "Loaded":
        pinned = map_tensors(
            self.batch, lambda tensor: tensor.pin_memory() if tensor.device == _CPU else tensor, "pin_memory"
        )
        return Loaded(pinned)
