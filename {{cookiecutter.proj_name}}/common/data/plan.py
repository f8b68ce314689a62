"""Which sample is used when: a function of (seed, epoch) alone, so a run can resume anywhere without replaying."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from common.base.errors import UserError
from common.data.keyed import BatchKey
from common.data.order import EpochOrder
from common.progress import Position


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
        order: the samples of each epoch.
        batch_size: samples per micro-batch and process.
        accumulate: micro-batches per optimizer step.
        drop_last: leave out the last global batch of an epoch when it is not full.
        in_blocks: each rank takes neighbouring micro-batches, which are the same on any number of ranks.
    """

    order: EpochOrder
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
                f"an epoch has no optimizer step: {self.order.size} samples, but one step takes "
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
        not_full = 0 if self.drop_last else self.samples_per_step - 1
        return (self.order.size + not_full) // self.samples_per_step

    def global_batches(self, at: Position) -> Iterator[GlobalBatch]:
        """Yield the global batches from `at` to the end of its epoch."""
        order = self.order(at.epoch)
        batch_size = self.batch_size
        per_step = self.samples_per_step
        stop = self.order.size
        if self.drop_last:
            stop -= per_step - 1
        starts = range(at.sample, stop, per_step)
        borrowed = min(2, batch_size)  # samples: from one, batch norm cannot compute a variance
        for start in starts:
            window = order[start : start + per_step]
            samples = len(window)
            share = window[self.rank :: self.world_size].tolist()
            # Rank 0 has the most micro-batches. The others run as many, if need be with borrowed samples of weight 0:
            # all ranks must take part in gradient synchronization and in gathering sharded weights.
            count = -(-samples // (self.world_size * batch_size))
            if self.in_blocks:
                block = batch_size * self.accumulate
                share = window[self.rank * block : (self.rank + 1) * block].tolist()
                count = max(1, -(-len(share) // batch_size))
            batches = [share[first : first + batch_size] for first in range(0, count * batch_size, batch_size)]
            weights = [len(batch) * self.world_size / samples for batch in batches]
            indices = [batch or window[:borrowed].tolist() for batch in batches]
            is_last = start == starts[-1]
            at = Position(at.step + 1, at.epoch + is_last, 0 if is_last else start + samples, self.order.size)
            yield GlobalBatch(indices, weights, [len(batch) for batch in batches], samples, at)


def evaluation_keys(size: int, batch_size: int, rank: int, world_size: int) -> list[BatchKey]:
    """This process' batches of an evaluation: in order, each sample once, no padding, uneven shares allowed.

    The set is cut into the same batches for any number of processes, and the batches are dealt out: every batch is
    computed on exactly the same tensor. Shares differ by at most one batch; a process may have none.
    """
    starts = range(rank * batch_size, size, world_size * batch_size)
    return [(0, list(range(first, min(first + batch_size, size)))) for first in starts]
