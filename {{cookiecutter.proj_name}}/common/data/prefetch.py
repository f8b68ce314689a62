"""Copies batches to the GPU while it still computes on the ones before them."""

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from common.base.nested import map_tensors
from common.data.move import to_device


def prefetch_to_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The same batches on a CUDA device. Each is copied by a stream of its own, one batch ahead of its use.

    The copies run beside the computation only if the batches are in pinned memory.
    """
    copying = torch.cuda.Stream(device)

    def copied(batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(copying):
            return to_device(batch, device), copying.record_event()

    for current, _ in pairwise(chain(map(copied, batches), [None])):
        assert current is not None
        batch, is_copied = current
        torch.cuda.current_stream(device).wait_event(is_copied)
        map_tensors(batch, _keep)
        yield batch


def _keep(tensor: Tensor) -> Tensor:
    """Have the memory of `tensor` reused only after the computation that is queued when it is freed."""
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor
