"""From a data set to batches: the loaders of training and evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch.utils.data import DataLoader

from common.base.errors import UserError
from common.config import Problem, section
from common.config.registry import COLLATE_REGISTRY, DATASET_REGISTRY, Registered
from common.data.keyed import KeyedBatches, SizedDataset, find_collate
from common.data.move import Loaded
from common.data.plan import BatchKey, EpochPlan, GlobalBatch, evaluation_keys
from common.data.workers import WorkerStart, end_workers, opened
from common.distributed import Rank
from common.progress import Position

# Keys of a data set's section that are ours; the others are arguments of the data set.
OWN = ("eval_batch_size",)
# What CUDA says in a forked process whose parent uses a GPU: of new things on the GPU, and of those that exist.
_CUDA_AFTER_FORK = ("Cannot re-initialize CUDA in forked subprocess", "CUDA error: initialization error")


@section
class LoaderConfig:
    """How batches are read, for every split."""

    collate: Annotated[
        str | None,
        Registered(COLLATE_REGISTRY),
        Field(
            description="makes a batch of a list of items: a registered name or module:function; "
            "null: the data set's own collate method, or PyTorch's default"
        ),
    ] = None
    drop_last: Annotated[
        bool, Field(description="train: leave out the last optimizer step of an epoch if not full")
    ] = False
    pin_memory: Annotated[bool | None, Field(description="page-locked batches; null: on when training on CUDA")] = None
    start_method: Annotated[
        Literal["fork", "spawn", "forkserver"] | None,
        Field(description="how workers are started; null: as Python does. spawn, forkserver: for data sets with CUDA"),
    ] = None
    prefetch: Annotated[int, Field(ge=1, description="batches each worker reads ahead")] = 2
    persistent: Annotated[bool, Field(description="keep workers alive between epochs")] = True
    timeout: Annotated[int, Field(ge=0, description="seconds to wait for a batch of a worker; 0: for ever")] = 0


class DatasetSection:
    """Checks a section that describes one split: `{type: DigitsDataset, eval_batch_size: 256, shift: 1}`."""

    ignore = OWN  # not arguments of the data set: they stay when `type` changes

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if value is None:
            return
        yield from DATASET_REGISTRY.check(value, key, ignore=OWN)
        size = value.get("eval_batch_size", 1) if isinstance(value, Mapping) else 1
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            yield Problem(f"{key}.eval_batch_size", size, "must be a whole number, at least 1")


class _Keys:
    """The batch sampler: whatever the plan says for the epoch and place it was pointed at."""

    def __init__(self, plan: EpochPlan) -> None:
        self.plan = plan
        self.epoch = 0
        self.sample = 0

    def __iter__(self) -> Iterator[BatchKey]:
        return self.plan.keys(self.epoch, self.sample)


class Step(NamedTuple):
    """What one optimizer step consumes: this process' micro-batches and the `GlobalBatch` they come from."""

    batches: list[Any]
    global_batch: GlobalBatch


class FirstSamples:
    """The first samples of a data set, for a quick look; everything else is as it was."""

    def __init__(self, dataset: SizedDataset, limit: int) -> None:
        self.whole = dataset
        self._limit = limit

    def __len__(self) -> int:
        return min(self._limit, len(self.whole))

    def __getitem__(self, index: int) -> Any:
        return self.whole[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "whole":  # pickling asks for attributes before there are any
            raise AttributeError(name)
        return getattr(self.whole, name)


def build_dataset(part: Mapping[str, Any], mode: str, data_dir: Path, *, limit: int = 0) -> SizedDataset:
    """The data set of one split.

    Raises:
        UserError: it is empty, or what the data set itself finds wrong (a missing folder, ...).
    """
    dataset = DATASET_REGISTRY.build(part, ignore=OWN, data_dir=data_dir, mode=mode)
    if not is_map_style(dataset):
        if mode != "train":
            raise UserError(
                f"dataset.{mode}: {type(dataset).__name__} needs __len__ and __getitem__ to be evaluated on"
            )
        return dataset
    if len(dataset) == 0:
        raise UserError(f"dataset.{mode}: {type(dataset).__name__} has no samples")
    return FirstSamples(dataset, limit) if limit else dataset


def is_map_style(dataset: Any) -> bool:
    """Whether samples can be asked for by number, or only read one after the other."""
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


class BatchStream(ABC):
    """Training data as the trainer sees it: a `TrainStream`, or a `common.data.iterable.IterableStream`.

    Attributes:
        steps_per_epoch: optimizer steps; None when that is not known.
        epoch_size: samples; 0 when that is not known.
        samples_per_step: samples of one optimizer step, over all ranks.
        is_exactly_resumable: whether `epoch` can start at exactly any position.
    """

    dataset: Any
    steps_per_epoch: int | None
    epoch_size: int
    samples_per_step: int
    is_exactly_resumable: bool
    _loader: DataLoader[Any]

    @abstractmethod
    def epoch(self, at: Position) -> Iterator[Step]:
        """The steps from `at` to the end of its epoch."""

    @abstractmethod
    def sample_batch(self, *, full: bool) -> Any:
        """A batch to try a model on: a small one, or a full one, whose shape is what a compiler will see."""

    @abstractmethod
    def samples(self, at: Position) -> list[list[int]]:
        """Numbers of this process' samples in the step that begins at `at`, by micro-batch; empty if they have none."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resume needs besides the position."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""

    def close(self) -> None:
        """End the processes that read; nothing will be read any more."""
        end_workers(self._loader)


class TrainStream(BatchStream):
    """A map-style data set, epoch by epoch, from any position: the order is a function of the epoch.

    Args:
        dataset: not empty.
        worker: loader processes; 0 reads in the main process. The batches are the same either way.
    """

    is_exactly_resumable = True

    def __init__(
        self,
        dataset: SizedDataset,
        plan: EpochPlan,
        config: LoaderConfig,
        *,
        worker: int,
        device: torch.device,
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.steps_per_epoch, self.epoch_size = plan.steps_per_epoch, plan.size
        self.samples_per_step = plan.samples_per_step
        self._keys = _Keys(plan)
        self._batches = KeyedBatches(dataset, find_collate(dataset, config.collate), plan.seed)
        self._loader = make_loader(
            self._batches, config, batch_sampler=self._keys, worker=worker, seed=plan.seed, device=device
        )

    def sample_batch(self, *, full: bool) -> Any:
        """A batch to try a model on; reading it draws from no random stream."""
        size = min(self.plan.batch_size if full else 2, self.plan.size)
        return checked(self._batches.__getitems__((0, list(range(size)))))

    def samples(self, at: Position) -> list[list[int]]:
        return next(self.plan.global_batches(at.epoch, at.step, at.sample)).indices

    def state_dict(self) -> dict[str, Any]:
        """The data set's own state, if it has any; the place in the data is the run's position."""
        own = getattr(self.dataset, "state_dict", None)
        return {"dataset": own()} if callable(own) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "dataset" in state and callable(own := getattr(self.dataset, "load_state_dict", None)):
            own(state["dataset"])

    def epoch(self, at: Position) -> Iterator[Step]:
        """The steps from `at` to the end of its epoch. Skipped samples are not read."""
        self._keys.epoch, self._keys.sample = at.epoch, at.sample
        batches = read(self._loader)
        for global_batch in self.plan.global_batches(at.epoch, at.step, at.sample):
            yield Step(list(islice(batches, len(global_batch.sizes))), global_batch)
        # Runs the iterator to its end, so that persistent workers are idle when the next epoch begins.
        next(batches, None)


class EvaluationLoader:
    """This process' share of a data set: in order, every sample of the whole set on exactly one process.

    Args:
        split, name: what is read; `name` is that of one of several sets of a split, else "".

    Attributes:
        size: samples of the whole set.
        keys: this process' batches, in the order they come.
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
        self.dataset = dataset
        self.split, self.name = split, name
        self.size, self.batch_size = len(dataset), batch_size
        self.keys = evaluation_keys(self.size, batch_size, rank.rank, rank.world_size)
        self._batches = KeyedBatches(dataset, find_collate(dataset, config.collate), seed)
        self._loader = make_loader(
            self._batches, config, batch_sampler=self.keys, worker=worker, seed=seed, device=rank.device
        )

    def __iter__(self) -> Iterator[Any]:
        return read(self._loader)

    def sample_batch(self) -> Any:
        """A batch of the first sample."""
        return checked(self._batches.__getitems__((0, [0])))

    def close(self) -> None:
        """End the processes that read; nothing will be read any more."""
        end_workers(self._loader)


def make_loader(
    batches: Any, config: LoaderConfig, *, worker: int, seed: int, device: torch.device, **sampling: Any
) -> DataLoader[Any]:
    """The `DataLoader` of a split; `sampling`: its options `batch_sampler` or `batch_size`."""
    return DataLoader(
        batches,
        **sampling,
        collate_fn=Loaded,
        num_workers=worker,
        pin_memory=device.type == "cuda" if config.pin_memory is None else config.pin_memory,
        prefetch_factor=config.prefetch if worker else None,
        persistent_workers=config.persistent and worker > 0 and "batch_sampler" in sampling,
        timeout=config.timeout if worker else 0,
        worker_init_fn=WorkerStart(),
        multiprocessing_context=config.start_method if worker else None,
        # Opening an iterator draws a number; from the global stream, that would shift the dropout of a resumed run.
        generator=torch.Generator().manual_seed(seed),
    )


def read(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of `loader`. Raises the user's mistakes that its workers send in place of a batch."""
    batches = opened(loader)
    while True:
        try:
            loaded = next(batches, None)
        except RuntimeError as error:
            for text in _CUDA_AFTER_FORK:
                if text in str(error):
                    raise UserError(
                        f"{text}: a worker process that was forked cannot use the GPU. Keep the data set on the CPU, "
                        "or start workers with --loader.start_method forkserver, or use none (--worker 0)"
                    ) from error
            raise
        if loaded is None:
            return
        yield checked(loaded.batch)


def checked(batch: Any) -> Any:
    """The batch; raises the user's mistake where that was returned in its place."""
    if isinstance(batch, UserError):
        raise batch
    return batch
