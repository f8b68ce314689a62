"""Numbers that are none: found before they reach a checkpoint."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.checkpoint import CheckpointFolder
from common.failsafe import TrainingError
from common.sharded import local


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every number of every tensor is finite, of sharded ones those that are here. Waits for the device."""
    norms = torch._foreach_norm([local(tensor.detach()) for tensor in tensors])
    return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


def not_finite(what: str, folder: CheckpointFolder) -> TrainingError:
    """The error to end a run with: what is wrong, what was saved before, what to try."""
    latest = folder.latest
    where = f"the last good checkpoint is {latest}" if latest.is_file() else "there is no checkpoint yet"
    return TrainingError(
        f"{what}; {where}.\n  Try a smaller optim.lr, optim.clip_gradients, or --debug to find the operation."
    )
