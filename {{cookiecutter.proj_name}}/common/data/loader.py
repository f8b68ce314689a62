"""From a dataset to batches: the loaders of training and evaluation."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import field, replace
from functools import partial
from itertools import islice, tee
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch.utils.data import DataLoader

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.config import section
from common.config.registry import COLLATE_REGISTRY, ORDER_REGISTRY, Registered
from common.data.keyed import BatchKey, KeyedBatches, SizedDataset, find_collate
from common.data.order import EpochOrder, EpochPlan, GlobalBatch
from common.data.view import kind_of
from common.data.workers import Loaded, end_workers, read, set_up_worker, until_signal
from common.distributed import Rank, has_streams
from common.progress import Position

_CPU = torch.device("cpu")
_SHOWN = 8  # sample numbers in a message


@section
class LoaderConfig:
    """How batches are read, for every split."""

    collate: Annotated[str | dict[str, Any] | None, Registered(COLLATE_REGISTRY)] = None
    """name or module:function, or {type, arguments}; null: the dataset's own, or PyTorch's default"""
    order: Annotated[dict[str, Any], Registered(ORDER_REGISTRY)] = field(default_factory=lambda: {"type": "shuffle"})
    """train: order of an epoch's samples: see --list order"""
    drop_last: bool = False
    """train: leave out an epoch's last step if it is not full"""
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """how workers start; null: Python's default; spawn, forkserver: for datasets that use CUDA"""
    prefetch: Annotated[int, Field(ge=1)] = 2
    """batches each worker reads ahead"""
    timeout: Annotated[int, Field(ge=0)] = 0
    """seconds to wait for a worker's batch; 0: no limit"""


class _Keys:
    """The batch sampler: the key of each micro-batch of this process in the rest of an epoch.

    A loader, and its workers, keep one sampler for the whole run; `TrainStream.epoch` gives it each epoch's batches.
    """

    epoch: int
    global_batches: Iterator[GlobalBatch]

    def __iter__(self) -> Iterator[BatchKey]:
        for global_batch in self.global_batches:
            for indices in global_batch.indices:
                yield self.epoch, indices


class Step(NamedTuple):
    """The data of one optimizer step: this process' micro-batches and the `GlobalBatch` they come from."""

    batches: list[Any]
    global_batch: GlobalBatch


class BatchReader:
    """A dataset and its batches, which a loader reads in this process or in workers.

    Args:
        keys: of this process' batches, in order. A loader, and its workers, keep this object for the whole run.
        worker: loader processes; 0 reads in the main process. The batches are the same either way.

    Attributes:
        batches: what makes batches of the dataset's samples.
        is_indexed: whether samples have numbers; if not, no batch can be read to try a model on and then read again.
    """

    is_indexed = True

    def __init__(
        self,
        dataset: SizedDataset,
        config: LoaderConfig,
        keys: Iterable[BatchKey],
        worker: int,
        seed: int,
        device: torch.device,
        *,
        training: bool = False,
    ) -> None:
        self.dataset: Any = dataset
        collate = find_collate(dataset, config.collate, training=training)
        self.batches: Any = KeyedBatches(dataset, collate, seed)
        self._make = partial(make_loader, self.batches, config, seed=seed, device=device)
        self._loader = self._make(worker=worker, batch_sampler=keys)

    def read_once(self, indices: Sequence[int]) -> Any:
        """Read a batch; with workers, in another worker, so that no file is opened here and then shared with them."""
        alone = self._make(worker=min(1, self._loader.num_workers), batch_sampler=[(0, list(indices))])
        [batch] = read(alone)
        end_workers(alone)
        return batch

    def close(self) -> None:
        """Stop the loader's worker processes, once no more data will be read."""
        end_workers(self._loader)


class TrainStream(BatchReader):
    """A map-style dataset, epoch by epoch, from any position: the order is a function of the epoch.

    The seat `stream`: `IterableStream` of parts/streams overrides what depends on the numbers of samples.

    Args:
        dataset: not empty.
        order: makes the order of an epoch's samples.
        plan: cuts it into steps.

    Attributes:
        steps_per_epoch: optimizer steps; None if unknown.
        epoch_size: samples; 0 if unknown.
        samples_per_step: samples of one optimizer step, over all ranks.
        is_exactly_resumable: whether `epoch` can start exactly at any position.
    """

    steps_per_epoch: int | None = None
    epoch_size = 0
    is_exactly_resumable = True

    def __init__(
        self,
        dataset: SizedDataset,
        order: EpochOrder,
        plan: EpochPlan,
        config: LoaderConfig,
        *,
        worker: int,
        device: torch.device,
    ) -> None:
        refuse_lost_state(dataset, worker)
        self.order = order
        self.plan = plan
        self.steps_per_epoch = plan.steps_per_epoch
        self.epoch_size = order.size
        self.samples_per_step = plan.samples_per_step
        self._keys = _Keys()
        super().__init__(dataset, config, self._keys, worker, order.seed, device, training=True)

    def sample_batch(self, *, full: bool) -> Any:
        """Return a batch to try a model on: a small one, or a full one, with the shape that a compiler will see.

        Reading it leaves the random generators unchanged.
        """
        size = self.plan.batch_size
        if not full:
            size = min(size, 2)
        return self.read_once(range(min(size, self.epoch_size)))

    def samples(self, at: Position, steps: int = 1, *, everywhere: bool = False) -> list[int]:
        """Return the numbers of this process' samples in `steps` steps from `at` on; empty if they have none.

        `everywhere`: of all processes, not only of this one.
        """
        ranks = [self.plan.rank]
        if everywhere:
            ranks = list(range(self.plan.world_size))
        found = []
        for rank in ranks:
            plan = replace(self.plan, rank=rank)
            after = at
            for _ in range(steps):
                step = next(plan.global_batches(self.order(after.epoch), after))
                after = step.after
                for indices in step.indices:
                    found += [index % len(self.dataset) for index in indices]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's own state, if it has any; the position in the data is part of the run's position."""
        if not callable(getattr(self.dataset, "state_dict", None)):
            return {}
        return {"dataset": self.dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "dataset" in state and callable(getattr(self.dataset, "load_state_dict", None)):
            self.dataset.load_state_dict(deepcopy(state["dataset"]))
            self.batches.restored = state["dataset"]

    def epoch(self, at: Position) -> Iterator[Step]:
        """Yield the steps from `at` to the end of its epoch. Skipped samples are not read."""
        order = self.order(at.epoch)  # of all its samples: common/data/order.py
        if not at.sample:
            self.batches.restored = None
        # Two copies: the sampler is ahead of the loop, as workers read ahead.
        for_sampler, for_loop = tee(self.plan.global_batches(order, at))
        self._keys.epoch = at.epoch
        self._keys.global_batches = for_sampler
        batches = read(self._loader)
        with until_signal(is_alone=self.plan.world_size == 1):
            for first in batches:  # to the loader's end, so that its workers stop at once
                global_batch = next(for_loop)
                others = islice(batches, len(global_batch.sizes) - 1)
                yield Step([first, *others], global_batch)


def refuse_lost_state(dataset: Any, worker: int) -> None:
    """Raise `UserError` if a training set has a state that a checkpoint would not hold, or that no resume restores.

    `worker`: loader processes that read copies of it.
    """
    if not callable(getattr(dataset, "state_dict", None)):
        return
    kind = f"dataset.train: {kind_of(dataset)} has a state of its own (state_dict)"
    if not callable(getattr(dataset, "load_state_dict", None)):
        raise UserError(f"{kind}, but no load_state_dict: a resume could not restore it")
    if worker:
        raise UserError(
            f"{kind}, but num_workers is {worker}: workers read copies, whose state no checkpoint holds. Use "
            "--num_workers 0; or let a sample depend on its index and the epoch (set_epoch) alone, without state_dict"
        )


class EvaluationLoader(BatchReader):
    """This process' share of a dataset: in order, every sample of the whole set on exactly one process, no padding.

    The set is cut into the same batches for any number of processes, and the batches are dealt out: every batch is
    computed on exactly the same tensor. Shares differ by at most one batch; a process may have none.

    Attributes:
        split, name: of the data; `name` is the name of a set where the split has several, else "".
        size: samples of the whole set.
        keys: this process' batches, in order.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        config: LoaderConfig,
        *,
        batch_size: int,
        worker: int,
        rank: Rank,
        seed: int,
        split: str = "eval",
        name: str = "",
    ) -> None:
        self.batch_size = batch_size
        self.seed = seed
        self.split = split
        self.name = name
        self.size = len(dataset)
        self.keys: list[BatchKey] = []
        for first in range(rank.rank * batch_size, self.size, rank.world_size * batch_size):
            indices = range(first, min(first + batch_size, self.size))
            self.keys.append((0, list(indices)))
        super().__init__(dataset, config, self.keys, worker, seed, rank.device)

    def __iter__(self) -> Iterator[Any]:
        return read(self._loader)

    def sample_batch(self, indices: Sequence[int] = (0,)) -> Any:
        """Return a batch of some samples."""
        return self.read_once(indices)


def make_loader(
    batches: Any,
    config: LoaderConfig,
    worker: int,
    seed: int,
    device: torch.device,
    **options: Any,
) -> DataLoader[Any]:
    """Make the `DataLoader` of a split; `options`: its `batch_sampler` or `batch_size`.

    `batches` gives finished batches (`KeyedBatches.__getitems__`), so `Loaded` only wraps them for pinning.
    """
    if worker:
        options["prefetch_factor"] = config.prefetch
        options["persistent_workers"] = "batch_sampler" in options
        options["timeout"] = config.timeout
        options["multiprocessing_context"] = config.start_method
    return DataLoader(
        batches,
        **options,
        collate_fn=Loaded,
        num_workers=worker,
        pin_memory=has_streams(device),
        worker_init_fn=partial(set_up_worker, os.getpid()),
        # Creating an iterator draws a number; from the global stream, that would shift the dropout of a resumed run.
        generator=torch.Generator().manual_seed(seed),
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor on `device`; from pinned memory they are moved asynchronously.

    Loaded batches are on the CPU. The caller may replace entries of a dict: `batch` keeps its own.
    """
    if device == _CPU:  # a fifth of the time of comparing device.type, in every step
        if type(batch) is dict:
            return batch.copy()
        return batch
    asynchronous = has_streams(device)
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=asynchronous), "to", device)


def whereabouts(stream: TrainStream, step: Step | None, at: Position) -> str:
    """Return the trainer's step and samples, given its position `at` and the last `step` it received."""
    if step is None:
        return "before the first step"
    if step.global_batch.after == at:
        return f"after training step {at.step}"
    return f"training step {at.step + 1}, epoch {at.epoch + 1}{sample_text(stream.samples(at))}"


def sample_text(numbers: Sequence[int]) -> str:
    """Name the first of these samples; empty for data without indices."""
    if not numbers:
        return ""
    text = f", of train samples {', '.join(map(str, numbers[:_SHOWN]))}"
    if len(numbers) > _SHOWN:
        text += f", ... ({len(numbers)} in all)"
    return text
