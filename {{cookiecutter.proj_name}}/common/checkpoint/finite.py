"""Infinities and NaNs, found before they reach a checkpoint."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.checkpoint.saver import Saver
from common.data.loader import BatchStream
from common.data.whereabouts import bad_step
from common.distributed import Rank
from common.distributed.sharded import local
from common.failure.program import TrainingError


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every number of every tensor is finite; of sharded ones, this process' part. Waits for the device."""
    norms = torch._foreach_norm([local(tensor.detach()) for tensor in tensors])
    return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


def bad_loss(step: int, here: bool, stream: BatchStream, saver: Saver, rank: Rank) -> TrainingError:
    """The error for a loss of `step` that is not finite; `here`: on this rank. Every process must call this."""
    where = bad_step(stream, step, here, rank)
    error = not_finite(f"the loss of step {step} is not a finite number ({where})", saver)
    error.elsewhere = not here
    return error


def not_finite(what: str, saver: Saver) -> TrainingError:
    """The error that ends a run: the fault, the last checkpoint, and advice."""
    advice = "Look for NaN in the data; then try a smaller optim.lr, clip_gradients, or --debug for the operation."
    saver.wait()  # the last good checkpoint may be just being written
    return TrainingError(f"{what}; {saver.folder.last_good}.\n  {advice}")
