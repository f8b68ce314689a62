"""The order of an epoch's training samples, and which of them each step and process takes.

Both are functions of seed, epoch, the dataset's size and the settings of batches and processes, not of what was read
before, so a run can resume anywhere without replaying.
"""

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from common.base.errors import UserError
from common.config.registry import ORDER_REGISTRY
from common.data.held import OwnGenerators
from common.data.keyed import set_epoch
from common.data.view import kind_of
from common.distributed.seed import mix, random_state_unchanged, seed_all
from common.progress import Position

Indices = np.ndarray[Any, Any]
"""Of samples, in the order in which they are used."""


class EpochOrder:
    """The samples of each epoch, by a function `(size, seed, epoch, dataset) -> indices`, called with these.

    It may leave out samples and repeat others, but every epoch must have the same number. Calls with the same arguments
    must return the same indices, in any process: from the global generators, which are seeded, or without randomness.

    Attributes:
        size: samples of an epoch.
    """

    def __init__(
        self,
        section: Mapping[str, Any],
        dataset: Any,
        seed: int,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.name = section["type"]
        self._samples = len(dataset)
        self._function = ORDER_REGISTRY.build(section)
        self._epoch = -1
        self._latest = np.empty(0)
        self.size = len(self(0))

    def __call__(self, epoch: int) -> Indices:
        """Return the indices of an epoch, shape (size,).

        Where samples repeat, each index has a multiple of len(dataset) added, so that each occurrence has random
        numbers of its own.
        """
        if self._epoch == epoch:
            return self._latest
        size = self._samples
        with random_state_unchanged():
            seed_all(mix(self.seed, epoch))
            OwnGenerators(self._function).seed(mix(self.seed, epoch))
            set_epoch(self.dataset, epoch)
            now = len(self.dataset)
            if now != size:
                raise UserError(
                    f"the length of {kind_of(self.dataset)} changed from {size} to {now} in epoch {epoch + 1}; it must "
                    "stay the same: let set_epoch, or whatever changes it, form the same number of items in each epoch"
                )
            given = self._function(size, self.seed, epoch, self.dataset)  # such as `shuffle`, below
        try:
            order = np.asarray(given)
        except ValueError:  # lists of different lengths
            order = np.empty((0, 0))
        problem = ""
        if order.ndim != 1 or not len(order) or order.dtype.kind not in "iu":
            what = f"an array of shape {order.shape} and type {order.dtype}"
            problem = f"{what}, not a list of indices; see docs/data.md, Batches of your own"
        elif order.min() < 0 or order.max() >= size:
            problem = f"indices from {order.min()} to {order.max()}, but the dataset has {size} samples"
        elif epoch and len(order) != self.size:  # epoch 0, called first, sets self.size
            problem = f"{len(order)} samples, but {self.size} in the first; the length of an epoch must not change"
        if problem:
            raise UserError(f"loader.order: {self.name} returned, for epoch {epoch + 1}, {problem}")
        order = order.astype(np.int64, copy=False)
        if np.bincount(order).max() > 1:  # place i becomes order[i] + size * i: `% size` is the sample
            order = order + size * np.arange(len(order))
        self._epoch = epoch
        self._latest = order
        return order


@ORDER_REGISTRY.register()
def shuffle(
    size: int,
    seed: int,
    epoch: int,
    dataset: Any,
) -> Indices:
    """Each sample once, in an order that is new in each epoch."""
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(size, generator=generator).numpy()


@ORDER_REGISTRY.register()
def sequential(
    size: int,
    seed: int,
    epoch: int,
    dataset: Any,
) -> Indices:
    """Each sample once, in the order of the dataset."""
    return np.arange(size)


class GlobalBatch(NamedTuple):
    """The samples of one optimizer step, as this process sees them.

    Attributes:
        indices: of the samples in each micro-batch of this process; empty for iterable datasets.
        weights: one factor per micro-batch of this process. The mean loss of each micro-batch, multiplied by its
            factor, summed over micro-batches and averaged over processes, is the mean over all samples of the step.
        sizes: samples in each micro-batch of this process; 0 for one of borrowed samples.
        samples: samples over all processes.
        after: the run's position once the step is done.
    """

    indices: list[list[int]]
    weights: list[float]
    sizes: list[int]
    samples: int
    after: Position


@dataclass(frozen=True)
class EpochPlan:
    """Cuts each epoch's order into global batches, these into shares of the ranks, and shares into micro-batches.

    Attributes:
        size: samples of an epoch.
        batch_size: samples per micro-batch and process.
        accumulate: micro-batches per optimizer step.
        drop_last: leave out the last global batch of an epoch when it is not full.
        in_blocks: each rank takes neighbouring micro-batches, which are the same on any number of ranks.
    """

    size: int
    _: KW_ONLY
    batch_size: int
    accumulate: int = 1
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    in_blocks: bool = False

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            raise UserError(
                f"an epoch has no optimizer step: {self.size} samples, but one step takes "
                f"{self.samples_per_step} ({self.batch_size} x {self.accumulate} accumulated x {self.world_size} "
                "processes) and loader.drop_last is true"
            )

    @property
    def samples_per_step(self) -> int:
        """Samples of a full optimizer step, over all processes."""
        return self.batch_size * self.accumulate * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch."""
        if self.drop_last:
            return self.size // self.samples_per_step
        return -(-self.size // self.samples_per_step)  # rounded up

    def global_batches(self, order: Indices, at: Position) -> Iterator[GlobalBatch]:
        """Yield the global batches from `at` to the end of its epoch, which has the samples in this order."""
        batch_size = self.batch_size
        per_step = self.samples_per_step
        stop = self.size  # where no step begins any more
        if self.drop_last:
            stop -= per_step - 1
        for start in range(at.sample, stop, per_step):
            window = order[start : start + per_step]
            samples = len(window)
            share = window[self.rank :: self.world_size].tolist()
            # Rank 0 has the most micro-batches. The others run the same number, if necessary with borrowed samples of
            # weight 0: all ranks must take part in gradient synchronization and in gathering sharded weights.
            count = -(-samples // (self.world_size * batch_size))
            if self.in_blocks:
                block = batch_size * self.accumulate
                share = window[self.rank * block : (self.rank + 1) * block].tolist()
                count = max(1, -(-len(share) // batch_size))
            indices = []
            weights = []
            sizes = []
            for first in range(0, count * batch_size, batch_size):
                batch = share[first : first + batch_size]
                sizes.append(len(batch))
                weights.append(len(batch) * self.world_size / samples)
                if not batch:
                    batch = window[: min(2, batch_size)].tolist()  # from one, batch norm cannot compute a variance
                indices.append(batch)
            epoch = at.epoch
            sample = start + samples
            if start + per_step >= stop:
                epoch += 1
                sample = 0
            at = Position(at.step + 1, epoch, sample, self.size)
            yield GlobalBatch(indices, weights, sizes, samples, at)
