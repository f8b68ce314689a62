"""Which sample is used when: a function of (seed, epoch) alone, so a run can go on from any place without replaying."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from common.base.errors import UserError
from common.distributed.seed import mix
from common.progress import Position

# (epoch, sample indices) of a micro-batch. With the seed, all that the randomness of its items may depend on.
BatchKey = tuple[int, list[int]]


class GlobalBatch(NamedTuple):
    """The samples of one optimizer step, as this process sees them.

    Attributes:
        weights: one factor per micro-batch of this process. The mean loss of each micro-batch, multiplied by its
            factor, summed over micro-batches and averaged over processes, is the mean over all samples of the window.
        sizes: samples in each micro-batch of this process.
        samples: samples over all processes.
        after: the run's position once the step is done.
    """

    weights: list[float]
    sizes: list[int]
    samples: int
    after: Position


class EpochPlan:
    """Cuts each epoch's order into windows, windows into shares of the ranks, and shares into micro-batches.

    Args:
        size: samples in the data set.
        batch_size: samples per micro-batch and process.
        accumulate: micro-batches per optimizer step.
        drop_last: leave out the last window of an epoch when it is not full.
    """

    def __init__(
        self,
        size: int,
        *,
        batch_size: int,
        accumulate: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.size = size
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.samples_per_step = batch_size * accumulate * world_size
        self._borrowed = min(2, batch_size)  # samples: of one, batch norm could not take a variance
        if self.steps_per_epoch == 0:
            raise UserError(
                f"an epoch has no optimizer step: {size} samples, but one step takes {self.samples_per_step} "
                f"({batch_size} x {accumulate} accumulated x {world_size} processes) and loader.drop_last is true"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch."""
        return self.size // self.samples_per_step if self.drop_last else -(-self.size // self.samples_per_step)

    def order(self, epoch: int) -> np.ndarray:
        """All sample indices in the order of this epoch, shape (size,)."""
        if not self.shuffle:
            return np.arange(self.size)
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        return torch.randperm(self.size, generator=generator).numpy()

    def starts(self, sample: int) -> range:
        """First sample of each window from `sample` to the end of the epoch."""
        stop = self.size - self.samples_per_step + 1 if self.drop_last else self.size
        return range(sample, stop, self.samples_per_step)

    def keys(self, epoch: int, sample: int) -> Iterator[BatchKey]:
        """This process' micro-batches, from `sample` to the end of the epoch. Nothing before `sample` is read."""
        order = self.order(epoch)
        for start in self.starts(sample):
            window = order[start : start + self.samples_per_step]
            share = window[self.rank :: self.world_size].tolist()
            for first in range(0, self._turns(len(window)) * self.batch_size, self.batch_size):
                # Where other ranks have a micro-batch more, this one borrows samples, with weight 0: it must take part
                # in the exchange of gradients and, with FSDP, of weights.
                yield epoch, share[first : first + self.batch_size] or window[: self._borrowed].tolist()

    def global_batches(self, epoch: int, step: int, sample: int) -> Iterator[GlobalBatch]:
        """The windows that go with `keys`, by arithmetic alone."""
        starts = self.starts(sample)
        last = len(starts)
        sizes, weights = self._share(self.samples_per_step)  # of all windows but perhaps the last
        for number, start in enumerate(starts, start=1):
            samples = self.samples_per_step
            if number < last:
                after = Position(step + number, epoch, start + samples, self.size)
            else:
                samples = min(samples, self.size - start)
                sizes, weights = self._share(samples)
                after = Position(step + number, epoch + 1, 0, self.size)
            yield GlobalBatch(weights, sizes, samples, after)

    def _share(self, samples: int) -> tuple[list[int], list[float]]:
        """Sizes and weights of this process' micro-batches in a window of `samples` samples."""
        share = max(0, -(-(samples - self.rank) // self.world_size))
        sizes = [min(self.batch_size, share - first) for first in range(0, share, self.batch_size)]
        weights = [size * self.world_size / samples for size in sizes]
        borrowed = self._turns(samples) - len(sizes)
        return sizes + [min(self._borrowed, samples)] * borrowed, weights + [0.0] * borrowed

    def _turns(self, samples: int) -> int:
        """Micro-batches of the first rank, which has the most, in a window of `samples` samples."""
        return -(-samples // (self.world_size * self.batch_size))


def evaluation_keys(size: int, batch_size: int, rank: int, world_size: int) -> list[BatchKey]:
    """This process' batches of an evaluation: in order, each sample once, no padding, uneven shares allowed.

    The set is cut into the same batches whatever the number of processes, and these are dealt out: so every batch is
    computed on the very same tensor. Shares differ by one batch at most; a process may have none.
    """
    starts = range(rank * batch_size, size, world_size * batch_size)
    return [(0, list(range(first, min(first + batch_size, size)))) for first in starts]
