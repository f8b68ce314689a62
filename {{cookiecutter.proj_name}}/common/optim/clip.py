"""Gradient clipping, by the norm over all gradients or value by value."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from common.config import section
from common.distributed.collectives import local, norm_over_shards


@section
class ClipConfig:
    """Gradient clipping."""

    clip_gradients: Annotated[float, Field(ge=0.0)] = 0.0
    """limit of the gradients; 0 turns clipping off"""
    clip_type: Literal["norm", "value"] = "norm"
    """norm: scale all gradients together to keep their norm within it; value: clamp each number"""


class Clip:
    """Clips gradients; to be called between the backward pass and the optimizer step, if `is_active`."""

    def __init__(self, config: ClipConfig) -> None:
        self._by_norm = config.clip_type == "norm"
        self._limit = config.clip_gradients
        self.is_active = bool(self._limit)

    def __call__(self, parameters: Sequence[Tensor]) -> Tensor:
        """Clip the parameters' gradients in place, with a limit above 0. Returns their norm before clipping."""
        norm = gradient_norm(parameters)
        parts = [local(p.grad) for p in parameters if p.grad is not None]
        if parts and self._by_norm:
            factor = (self._limit / (norm + 1e-6)).clamp_(max=1.0)
            torch._foreach_mul_(parts, factor)
        elif parts:
            torch._foreach_clamp_min_(parts, -self._limit)
            torch._foreach_clamp_max_(parts, self._limit)
        return norm


def gradient_norm(parameters: Sequence[Tensor], *, here: bool = False) -> Tensor:
    """Return the 2-norm of all gradients, a scalar on their device that was not waited for.

    Of sharded gradients, it is the norm over all processes, and every process must call this; with `here`, that
    of this process' part.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    sharded = hasattr(gradients[0], "to_local")  # as `is_sharded`, without a call in each step
    parts = []
    for gradient in gradients:
        part = local(gradient) if sharded else gradient
        if part.is_sparse:
            part = part.coalesce().values()
        parts.append(part)
    # As `nn.utils.get_total_norm`, whose search for other devices takes 20 us.
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts)))
    if sharded and not here:
        return norm_over_shards(norm, gradients[0])
    return norm
