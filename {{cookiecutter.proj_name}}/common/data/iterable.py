"""Training data that is only known by reading it: streams, generated samples, data sets without length."""

import random
import re
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from loguru import logger
from torch.utils.data import DataLoader, IterableDataset

from common.base.errors import UserError
from common.data.fork import check_fork
from common.data.keyed import find_collate, seed_all
from common.data.loader import LoaderConfig, Step, checked
from common.data.move import Loaded
from common.data.plan import GlobalBatch
from common.data.workers import WorkerStart, opened
from common.distributed import Rank, check_same, gather_objects, max_over_ranks
from common.distributed.seed import mix
from common.progress import Position

_STREAM = 2  # tells the keys of an iterable's batches from those of samples
_UNLIKE = (
    "reads other records than rank 0, so they cannot be dealt out. Let the data set read the same on every process, or "
    "give it a method share(reader, readers), with which it reads a share of its own; see Data in README.md"
)


class _Turn(NamedTuple):
    """A micro-batch of this process, one of those that the ranks compute at the same time."""

    batch: Any
    size: int  # its samples; 0 where they are only borrowed from other ranks
    total: int  # samples over all ranks
    mark: int  # of the epoch's first record


class _Batches(IterableDataset[Any]):
    """Cuts an iterable into micro-batches, each read with random streams that depend on its number alone.

    Each reader reads all records and keeps its own: of `batch_size` records per rank, rank 0 has the first, rank 1 the
    second and so on, and of these batches the workers of a rank take turns. So they are the same with any number of
    workers. Of a data set with `share`, which gives each reader other records, all are kept.
    """

    def __init__(self, dataset: Any, batch_size: int, collate: Any, seed: int, rank: int, ranks: int) -> None:
        self.dataset, self.batch_size, self.collate, self.seed = dataset, batch_size, collate, seed
        self.rank, self.ranks = rank, ranks
        self.shares = callable(getattr(dataset, "share", None))
        self.epoch = self.number = 0

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if info and self.shares:
            self.dataset.share(self.rank * workers + worker, self.ranks * workers)
        elif info:
            # A data set that asks PyTorch for its worker would leave out what the others keep.
            torch.utils.data._utils.worker._worker_info = None
        items = iter(self.dataset)
        while turn := self._next(items, worker, workers, in_worker=info is not None):
            yield from filter(None, turn)

    def _next(self, items: Iterator[Any], worker: int, workers: int, *, in_worker: bool) -> list[Any]:
        """The next turn in a list, or None for one that is another worker's; an empty list at the end."""
        saved = None if in_worker else (random.getstate(), np.random.get_state(), torch.get_rng_state())
        number, self.number = self.number, self.number + 1
        ranks, reader = (1, self.rank * workers + worker) if self.shares else (self.ranks, 0)
        try:
            seed_all(mix(self.seed, _STREAM, self.epoch, number, reader))
            records = list(islice(items, self.batch_size * ranks))
            if not records:
                return []
            if not self.shares and number % workers != worker:
                return [None]
            own = records if self.shares else records[self.rank :: ranks]
            total = len(own) * self.ranks if self.shares else len(records)
            mark = _mark(records[0]) if number == 0 and ranks > 1 else 0
            # Where only other ranks have a sample left, this one borrows, with weight 0; see `EpochPlan.keys`.
            return [_Turn(self.collate(own or records[:2]), len(own), total, mark)]
        except UserError as error:
            return [error]
        finally:
            if saved is not None:
                random.setstate(saved[0])
                np.random.set_state(saved[1])
                torch.set_rng_state(saved[2])


def _mark(record: Any) -> int:
    """A number that equal records have in common, in any process."""
    return zlib.crc32(re.sub(r" at 0x\w+", "", repr(record)).encode())


class IterableStream:
    """The training data of an iterable data set, each record once over all ranks and workers.

    They are dealt out by their position (see `_Batches`), which takes a data set that reads the same records in the
    same order everywhere; or the data set has `share(reader, readers)`, and from then on reads the share `reader`, from
    0, of `readers` of its own. Ranks then count alike in the last step of an epoch, even if one of them has fewer
    samples for it, and the epoch ends when the first has read all of its share.

    Where the data set has `state_dict` and `load_state_dict` and is read in the main process, a resumed run goes on at
    the very sample. Otherwise the epoch is read again up to that place: exact if the data set repeats itself.
    """

    def __init__(
        self,
        dataset: Any,
        config: LoaderConfig,
        *,
        batch_size: int,
        accumulate: int,
        worker: int,
        rank: Rank,
        seed: int,
    ) -> None:
        self.dataset, self.rank, self.accumulate, self.batch_size = dataset, rank, accumulate, batch_size
        check_fork(dataset, config.start_method, worker)
        collate = find_collate(dataset, config.collate)
        self._batches = _Batches(dataset, batch_size, collate, seed, rank.rank, rank.world_size)
        self._shares = self._batches.shares
        if self._shares:
            dataset.share(rank.rank, rank.world_size)  # workers get theirs when they begin to read
        elif (readers := rank.world_size * max(1, worker)) > 1:
            logger.info("dataset.train: each of {} readers reads all records and keeps its share", readers)
        self._has_state = callable(getattr(dataset, "state_dict", None)) and worker == 0
        self._state: dict[str, Any] = {}
        self._restored = False
        self._loader: DataLoader[Any] = DataLoader(
            self._batches,
            batch_size=None,
            collate_fn=Loaded,
            num_workers=worker,
            pin_memory=rank.device.type == "cuda" if config.pin_memory is None else config.pin_memory,
            prefetch_factor=config.prefetch if worker else None,
            timeout=config.timeout if worker else 0,
            worker_init_fn=WorkerStart(),
            multiprocessing_context=config.start_method if worker else None,
            generator=torch.Generator().manual_seed(seed),
        )

    @property
    def steps_per_epoch(self) -> int | None:
        """Not known before it was read."""
        return None

    @property
    def epoch_size(self) -> int:
        """Not known: 0."""
        return 0

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.batch_size * self.accumulate * self.rank.world_size

    @property
    def is_exactly_resumable(self) -> bool:
        return self._has_state

    def sample_batch(self, *, full: bool) -> Any:
        """A batch to try a model on. What can restore its place has not moved afterwards."""
        own = getattr(self.dataset, "state_dict", None)
        state = own() if callable(own) else None
        records = list(islice(iter(self.dataset), self.batch_size if full else 2))
        if not records:
            raise self._nothing(Position())
        if state is not None:
            self.dataset.load_state_dict(state)
        return self._batches.collate(records)

    def _nothing(self, at: Position) -> UserError:
        after = f" after the first {at.sample}" if at.sample else ""
        return UserError(
            f"dataset.train: {type(self.dataset).__name__} gave no sample{after} in epoch {at.epoch + 1}; each call of "
            "its __iter__ must begin anew, and every process must have something to read"
        )

    def samples(self, at: Position) -> list[list[int]]:
        """What is only read in order has no numbers."""
        return []

    def epoch(self, at: Position) -> Iterator[Step]:
        """The steps from `at` to the end of the epoch. Raises `UserError` when there are none."""
        batches = self._opened(at)
        step, sample = at.step, at.sample
        ahead, self._state = self._take(batches)
        if not ahead:
            raise self._nothing(at)
        check_same({"a mark of the first record of dataset.train": ahead[0].mark}, self.rank, _UNLIKE)
        while ahead:
            window, state = ahead, self._state
            # Looked at one window ahead, to know the last one; what is saved is the state before that look.
            ahead, after_ahead = self._take(batches)
            self._state = state
            step, sample = step + 1, sample + self.samples_per_step
            place = Position(step, at.epoch, sample, 0) if ahead else Position(step, at.epoch + 1, 0, 0)
            if not ahead:
                self._state = {}
            if self._shares and self.accumulate > 1:
                # Where other ranks have a micro-batch more, this one repeats its last, with weight 0.
                borrowed = max_over_ranks(len(window), self.rank) - len(window)
                window = window + [window[-1]._replace(size=0, total=0)] * borrowed
            sizes, total = [turn.size for turn in window], sum(turn.total for turn in window)
            weights = [size * self.rank.world_size / total for size in sizes]
            yield Step([turn.batch for turn in window], GlobalBatch(weights, sizes, total, place))
            self._state = after_ahead

    def _opened(self, at: Position) -> Iterator[Any]:
        """An iterator of batches that stands at `at`."""
        read = at.sample // (self.batch_size * self.rank.world_size)
        self._batches.epoch, self._batches.number = at.epoch, 0
        restored, self._restored = self._restored, False
        if restored:
            self._batches.number = read
        batches = map(checked, opened(self._loader))
        if read and not restored:
            logger.warning("the data set cannot restore its place: reading {} batches again to come to it", read)
            for _ in range(read):
                next(batches, None)
        return batches

    def _take(self, batches: Iterator[_Turn]) -> tuple[list[_Turn], dict[str, Any]]:
        """The micro-batches of a window, none at the end of the epoch, and the data set's state after them."""
        found = list(islice(batches, self.accumulate))
        if self._shares:
            if max_over_ranks(int(not found), self.rank):
                found = []
        elif (total := sum(turn.total for turn in found)) != max_over_ranks(total, self.rank):
            raise UserError(f"dataset.train: rank {self.rank.rank} {_UNLIKE}")
        return found, {"dataset": self.dataset.state_dict()} if self._has_state else {}

    def close(self) -> None:
        """Nothing will be read any more."""

    def state_dict(self) -> dict[str, Any]:
        """The data set's own states after the last step, of each rank that shares by itself; empty between epochs."""
        return {"states": gather_objects(self._state, self.rank) if self._shares else [self._state]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch go on at the saved place. Raises `UserError` when that belongs to other shares."""
        states = state["states"]
        if not any(states) or not self._has_state:
            return
        if self._shares and len(states) != self.rank.world_size:
            raise UserError(
                f"dataset.train: {type(self.dataset).__name__} was shared by {len(states)} process(es) when the "
                f"checkpoint was saved inside an epoch, so it is resumed with as many, not {self.rank.world_size}"
            )
        self.dataset.load_state_dict(states[self.rank.rank if self._shares else 0]["dataset"])
        self._restored = True
