"""Gradient clipping, by the norm over all gradients or value by value."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from common.config import Problem, section
from common.distributed.sharded import is_sharded, local, norm_over_shards
from common.progress import EpochInterval, Interval, Position

_START = Position()


@section
class ClipConfig:
    """Gradient clipping."""

    clip_gradients: Annotated[float, Field(ge=0.0, description="limit of the gradients; 0 turns clipping off")] = 0.0
    clip_type: Annotated[
        Literal["norm", "value"],
        Field(description="norm: scale all gradients together to keep their norm within it; value: cut each number"),
    ] = "norm"
    clip_warmup: Annotated[
        EpochInterval,
        Field(description='from here on clip_gradients_warmup is the limit: epochs, or "100step"; -1 = never'),
    ] = -1
    clip_gradients_warmup: Annotated[
        float, Field(ge=0.0, description="limit once clip_warmup has passed; 0 turns clipping off")
    ] = 0.0

    def problems(self) -> Iterator[Problem]:
        """A `clip_warmup` of 0, which would change the limit before the first step."""
        if not Interval.parse(self.clip_warmup, "epoch") and str(self.clip_warmup).lstrip().startswith("0"):
            hint = "write that limit in clip_gradients, or -1 here for never"
            yield Problem("clip_warmup", self.clip_warmup, "replaces clip_gradients from the first step on", hint)


class Clip:
    """Clips gradients; to be called between the backward pass and the optimizer step."""

    def __init__(self, config: ClipConfig) -> None:
        self._by_norm = config.clip_type == "norm"
        self._limit, self._later_limit = config.clip_gradients, config.clip_gradients_warmup
        self._change = Interval.parse(config.clip_warmup, "epoch")
        self.is_active = bool(self._limit or (self._change and self._later_limit))

    def __call__(self, parameters: Sequence[Tensor], position: Position) -> Tensor | None:
        """Clip the parameters' gradients in place.

        `position` is the run's position before this optimizer step. Returns the 2-norm of all gradients before
        clipping, a scalar on their device that was not waited for (of sharded gradients, FSDP, the norm over all
        processes); None if clipping is off.
        """
        limit = self._later_limit if self._change.is_due(_START, position) else self._limit
        if limit == 0:
            return None
        gradients = [p.grad for p in parameters if p.grad is not None]
        parts = [local(gradient) for gradient in gradients]
        norm = nn.utils.get_total_norm(parts)
        if not parts:
            return norm
        if is_sharded(gradients[0]):
            norm = norm_over_shards(norm, gradients[0])
        if self._by_norm:
            torch._foreach_mul_(parts, (limit / (norm + 1e-6)).clamp_(max=1.0))
        else:
            torch._foreach_clamp_min_(parts, -limit)
            torch._foreach_clamp_max_(parts, limit)
        return norm
