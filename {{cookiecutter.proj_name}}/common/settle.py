"""The first step of DDP, taken before anything counts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.distributed import Rank
from common.seed import random_state, set_random_state


def settle_buckets(model: nn.Module, loss: Callable[[], Tensor], rank: Rank) -> None:
    """One backward for nothing: it changes neither weights nor buffers nor random streams. Nothing to do without DDP.

    DDP exchanges gradients in one order in its first backward and in another from the second on. A resumed run would
    begin with the first again and, with three ranks or more, add up in another order than the uncut run.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    buffers = [buffer.detach().clone() for buffer in model.buffers()]
    streams = random_state(rank.device)
    model.train()
    loss().backward()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    set_random_state(streams, rank.device)
