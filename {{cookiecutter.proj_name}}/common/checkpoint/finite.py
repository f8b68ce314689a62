"""Infinities and NaNs, found before they reach a checkpoint."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from common.checkpoint.saver import Saver
from common.data.loader import BatchStream
from common.data.whereabouts import bad_samples
from common.distributed import Rank
from common.distributed.sharded import local
from common.failure.program import TrainingError


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether every number of every tensor is finite; of sharded ones, this process' part.

    Waits for the device.
    """
    norms = torch._foreach_norm([local(tensor.detach()) for tensor in tensors])
    return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


class LossCheck:
    """Ends the run before the optimizer uses a loss of this process that is not finite.

    On the CPU that is before the backward pass, which no other process can then finish. A GPU is not waited for: the
    value is copied while the GPU continues, and checked in the next batch. So one step is taken with it at most, and
    nothing of that is saved, see `Trainer.check_losses`.
    """

    def __init__(self, stream: BatchStream, saver: Saver, rank: Rank) -> None:
        self._about = stream, saver, rank
        self._copied: tuple[int, Tensor, torch.cuda.Event] | None = None

    def __call__(self, step: int, loss: Tensor) -> None:
        """Check the loss of `step`, counted from 1; on a GPU, the loss before it."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return  # `backward` says what is wrong
        if loss.is_cpu:
            if not math.isfinite(loss.item()):
                raise bad_loss(step, *self._about)
        elif loss.is_cuda:
            before, event = self._copied, torch.cuda.Event()
            self._copied = step, loss.detach().to("cpu", non_blocking=True), event
            event.record()
            if before is not None:
                before[2].synchronize()
                if not math.isfinite(before[1].item()):
                    raise bad_loss(before[0], *self._about)


def bad_loss(step: int, stream: BatchStream, saver: Saver, rank: Rank) -> TrainingError:
    """Return the error for a loss of `step` that is not finite on this rank."""
    return not_finite(f"the loss of step {step} is not a finite number ({bad_samples(stream, step, rank)})", saver)


def not_finite(what: str, saver: Saver) -> TrainingError:
    """Return the error that ends a run: the fault, the last checkpoint, and advice."""
    advice = "Look for NaN in the data; then try a smaller optim.lr, clip_gradients, or --debug for the operation."
    saver.wait()  # the last good checkpoint may be just being written
    return TrainingError(f"{what}; {saver.folder.last_good}.\n  {advice}")
