"""From a dataset to batches: the loaders of training and evaluation."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import islice, tee
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch.utils.data import DataLoader

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.config import section
from common.config.registry import COLLATE_REGISTRY, ORDER_REGISTRY, Registered
from common.data.keyed import BatchKey, KeyedBatches, SizedDataset, find_collate
from common.data.order import EpochPlan, GlobalBatch, evaluation_keys
from common.data.view import kind_of
from common.data.workers import Loaded, WaitInterrupted, end_workers, read, set_up_worker
from common.distributed import Rank, has_streams
from common.progress import Position

_CPU = torch.device("cpu")
_SHOWN = 8  # sample numbers in a message


@section
class LoaderConfig:
    """How batches are read, for every split."""

    collate: Annotated[
        str | dict[str, Any] | None,
        Registered(COLLATE_REGISTRY),
        Field(
            description="name or module:function, or {type, arguments}; null: the dataset's own, or PyTorch's default"
        ),
    ] = None
    order: Annotated[
        dict[str, Any],
        Registered(ORDER_REGISTRY),
        Field(description="train: order of an epoch's samples: see --list order"),
    ] = field(default_factory=lambda: {"type": "shuffle"})
    drop_last: Annotated[bool, Field(description="train: leave out an epoch's last step if it is not full")] = False
    start_method: Annotated[
        Literal["fork", "spawn", "forkserver"] | None,
        Field(description="how workers start; null: Python's default; spawn, forkserver: for datasets that use CUDA"),
    ] = None
    prefetch: Annotated[int, Field(ge=1, description="batches each worker reads ahead")] = 2
    timeout: Annotated[int, Field(ge=0, description="seconds to wait for a worker's batch; 0: no limit")] = 0


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


class BatchStream(Protocol):
    """The seat `stream`, training data as the trainer sees it: a `TrainStream`, or what a part opens.

    Attributes:
        batches: what makes batches of the dataset's samples.
        steps_per_epoch: optimizer steps; None if unknown.
        epoch_size: samples; 0 if unknown.
        samples_per_step: samples of one optimizer step, over all ranks.
        is_exactly_resumable: whether `epoch` can start exactly at any position.
        is_indexed: whether samples have numbers; if not, no batch can be read to try a model on and then read again.
    """

    dataset: Any
    batches: Any
    steps_per_epoch: int | None = None
    epoch_size: int = 0
    samples_per_step: int
    is_exactly_resumable: bool
    is_indexed: bool = False
    _loader: DataLoader[Any]

    def epoch(self, at: Position) -> Iterator[Step]:
        """Return the steps from `at` to the end of its epoch."""

    def sample_batch(self, *, full: bool) -> Any:
        """Return a batch to try a model on: a small one, or a full one, with the shape that a compiler will see."""

    def samples(self, at: Position, steps: int = 1, *, everywhere: bool = False) -> list[list[int]]:
        """Indices of the samples in `steps` steps from `at` on, by micro-batch; empty if they have none.

        `everywhere`: of all processes, not only of this one.
        """
        return []

    def state_dict(self) -> dict[str, Any]:
        """State that a resume needs besides the position."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def close(self) -> None:
        """Stop the loader's worker processes, once no more data will be read."""
        end_workers(self._loader)


class TrainStream(BatchStream):
    """A map-style dataset, epoch by epoch, from any position: the order is a function of the epoch.

    Args:
        dataset: not empty.
        worker: loader processes; 0 reads in the main process. The batches are the same either way.
    """

    is_exactly_resumable = is_indexed = True

    def __init__(
        self,
        dataset: SizedDataset,
        plan: EpochPlan,
        config: LoaderConfig,
        *,
        worker: int,
        device: torch.device,
    ) -> None:
        refuse_lost_state(dataset, worker)
        self.dataset = dataset
        self.plan = plan
        self.steps_per_epoch = plan.steps_per_epoch
        self.epoch_size = plan.order.size
        self.samples_per_step = plan.samples_per_step
        self._keys = _Keys()
        seed = plan.order.seed
        collate = find_collate(dataset, config.collate, training=True)
        self.batches = KeyedBatches(dataset, collate, seed)
        self._loader = make_loader(self.batches, config, worker, seed, device, batch_sampler=self._keys)

    def sample_batch(self, *, full: bool) -> Any:
        """Return a batch to try a model on; reading it leaves the random generators unchanged."""
        size = 2
        if full:
            size = self.plan.batch_size
        return _read_once(self._loader, list(range(min(size, self.epoch_size))))

    def samples(self, at: Position, steps: int = 1, *, everywhere: bool = False) -> list[list[int]]:
        ranks = [self.plan.rank]
        if everywhere:
            ranks = list(range(self.plan.world_size))
        found = []
        for rank in ranks:
            plan = replace(self.plan, rank=rank)
            start = at
            end = at.step + steps
            while start.step < end:
                for step in islice(plan.global_batches(start), end - start.step):
                    start = step.after
                    for indices in step.indices:
                        found.append([index % len(self.dataset) for index in indices])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's own state, if it has any; the position in the data is part of the run's position."""
        dataset: Any = self.dataset
        if not callable(getattr(dataset, "state_dict", None)):
            return {}
        return {"dataset": dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        dataset: Any = self.dataset
        if "dataset" in state and callable(getattr(dataset, "load_state_dict", None)):
            dataset.load_state_dict(state["dataset"])

    def epoch(self, at: Position) -> Iterator[Step]:
        """Yield the steps from `at` to the end of its epoch. Skipped samples are not read."""
        # The sampler is ahead of the loop, as workers read ahead. The second copy is paired with what comes back.
        ahead, global_batches = tee(self.plan.global_batches(at))
        self._keys.epoch = at.epoch
        self._keys.global_batches = ahead
        batches: Iterator[Any] = read(self._loader)
        try:
            for first in batches:  # to the loader's end, so that its workers stop at once
                global_batch = next(global_batches)
                others = islice(batches, len(global_batch.sizes) - 1)
                yield Step([first, *others], global_batch)
        except WaitInterrupted:
            if self.plan.world_size > 1:  # others wait for this process
                raise


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


@dataclass(eq=False)
class EvaluationLoader:
    """This process' share of a dataset: in order, every sample of the whole set on exactly one process.

    Attributes:
        split, name: of the data; `name` is the name of a set where the split has several, else "".
        size: samples of the whole set.
        keys: this process' batches, in order.
    """

    dataset: SizedDataset
    config: LoaderConfig
    _: KW_ONLY
    batch_size: int
    worker: int
    rank: Rank
    seed: int
    split: str = "eval"
    name: str = ""

    def __post_init__(self) -> None:
        self.size = len(self.dataset)
        self.keys = evaluation_keys(self.size, self.batch_size, self.rank.rank, self.rank.world_size)
        collate = find_collate(self.dataset, self.config.collate)
        self.batches = KeyedBatches(self.dataset, collate, self.seed)
        self._loader = make_loader(
            self.batches, self.config, self.worker, self.seed, self.rank.device, batch_sampler=self.keys
        )

    def __iter__(self) -> Iterator[Any]:
        return read(self._loader)

    def sample_batch(self, indices: Sequence[int] = (0,)) -> Any:
        """Return a batch of some samples."""
        return _read_once(self._loader, list(indices))

    def close(self) -> None:
        """Stop the loader's worker processes, once no more data will be read."""
        end_workers(self._loader)


def _read_once(loader: DataLoader[Any], indices: list[int]) -> Any:
    """Read a batch. With workers, by one of its own: they would share the files that a dataset opens here."""
    key = (0, indices)
    if loader.num_workers == 0:
        return loader.dataset.__getitems__(key)  # type: ignore[attr-defined]
    alone = DataLoader(
        loader.dataset,
        batch_sampler=[key],  # type: ignore[list-item]
        collate_fn=Loaded,
        num_workers=1,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # not the global one, which would shift the draws of training
    )
    return next(read(alone))


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
    """Move every tensor of `batch` to `device`; from pinned memory asynchronously.

    Loaded batches are on the CPU.
    """
    if device == _CPU:  # a fifth of the time of comparing device.type, in every step
        return batch
    later = has_streams(device)
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=later), "to", device)


def whereabouts(stream: BatchStream, step: Step | None, at: Position) -> str:
    """Return the trainer's step and samples, given its position `at` and the last `step` it received."""
    if step is None:
        return "before the first step"
    if step.global_batch.after == at:
        epoch = at.epoch
        if at.sample > 0 or at.epoch_size == 0:  # not at an epoch's end
            epoch += 1
        return f"after training step {at.step}, epoch {epoch}"
    return f"training step {at.step + 1}, epoch {at.epoch + 1}{sample_text(stream.samples(at))}"


def bad_samples(stream: BatchStream, step: int, rank: Rank) -> str:
    """This rank and its samples of a step, counted from 1."""
    if stream.steps_per_epoch is None:
        return f"rank {rank.rank}"
    epoch, number = divmod(step - 1, stream.steps_per_epoch)
    at = Position(step - 1, epoch, number * stream.samples_per_step, stream.epoch_size)
    return f"rank {rank.rank}{sample_text(stream.samples(at))}"


def sample_text(batches: list[list[int]]) -> str:
    """Name the first samples of these batches; empty for data without indices."""
    numbers = [number for batch in batches for number in batch]
    if not numbers:
        return ""
    text = f", of train samples {', '.join(map(str, numbers[:_SHOWN]))}"
    if len(numbers) > _SHOWN:
        text += f", ... ({len(numbers)} in all)"
    return text
