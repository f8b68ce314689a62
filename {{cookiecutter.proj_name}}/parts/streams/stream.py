"""Training data that can only be read in sequence: streams, generated samples, datasets without a length."""

import re
import sys
import zlib
from collections.abc import Generator, Iterator, Mapping
from copy import deepcopy
from itertools import chain, count, islice, pairwise
from typing import Any, NamedTuple

import torch
from loguru import logger
from torch.utils.data import IterableDataset

from common.base.errors import UserError
from common.data.held import OwnGenerators
from common.data.keyed import find_collate, make_batch, set_epoch
from common.data.loader import Step, TrainStream, make_loader, refuse_lost_state
from common.data.order import GlobalBatch
from common.data.view import kind_of
from common.data.workers import read, until_signal
from common.distributed import Rank, gather_objects, max_over_ranks
from common.distributed.seed import mix, random_state_unchanged, seed_all
from common.progress import Position
from common.settings import RunConfig

_STREAM = 2  # distinguishes the keys of an iterable's batches from those of samples
_DIFFERENT_RECORDS = (
    "dataset.train: the {} read different records, so these cannot be shared out. Let the dataset read the same in "
    "every process (with an order that depends on set_epoch alone), or give it a method share(reader, readers), with "
    "which it reads a share of its own; see docs/parts/streams.md"
)
_TOO_SHORT = "dataset.train: {} has reads_in_step, but ended after {} records of {}; it must yield all of its __len__"


class _MicroBatch(NamedTuple):
    """A micro-batch of this process; all ranks compute theirs at the same time."""

    batch: Any
    size: int  # samples that count; 0 if all of them are borrowed
    total: int  # samples over all ranks, if these read the same records
    mark: int  # a checksum of the epoch's first record, if the reader has read it; else 0


class _Read(NamedTuple):
    """The data of one step: micro-batches, and samples over all ranks; 0 at the end of an epoch.

    `state`: after these micro-batches: of the dataset, and whether it has `ended` on this process.
    """

    batches: list[_MicroBatch]
    total: int
    state: dict[str, Any]


class _Batches(IterableDataset[Any]):
    """Cuts an iterable into micro-batches, each read with random generators seeded by its number.

    Each reader reads all records and keeps its own: the records of a batch are dealt to the ranks one by one, and the
    workers of a rank take its micro-batches in turn. So micro-batches are the same with any number of workers. A data
    set with `share` gives each reader different records, and the reader keeps them all.
    """

    def __init__(self, dataset: Any, batch_size: int, collate: Any, seed: int, rank: Rank, limit: int) -> None:
        self.dataset, self.batch_size, self.collate, self.seed = dataset, batch_size, collate, seed
        self.limit = limit or sys.maxsize
        self.rank, self.ranks = rank.rank, rank.world_size
        self.shares = callable(getattr(dataset, "share", None))
        # Where the next pass begins: epoch, number of the micro-batch, and a state for the dataset to continue from.
        self.epoch = self.first = 0
        self.state: Any = None
        self.begins_anew = False  # at the end of an epoch, where the dataset may stand, it gives nothing at first

    def __iter__(self) -> Iterator[_MicroBatch]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, ranks, reader, limit = self.rank, self.ranks, 0, self.limit
        if self.shares:
            reader, limit = rank * workers + worker, -(-limit // (ranks * workers))
            if info:
                self.dataset.share(reader, ranks * workers)
            rank, ranks, worker, workers = 0, 1, 0, 1  # each reader keeps all that it reads
        elif info:
            # A dataset that shards itself by get_worker_info() would skip records; here every worker must read all.
            torch.utils.data._utils.worker._worker_info = None
        records_of_pass, own = self._begin(reader)
        source = islice(records_of_pass, max(limit - self.first * self.batch_size * ranks, 0))
        mark = 0
        for number in count(self.first):
            is_own = number % workers == worker
            with random_state_unchanged():
                seed = mix(self.seed, _STREAM, self.epoch, number, reader)
                seed_all(seed)
                own.seed(seed)
                records = list(islice(source, self.batch_size * ranks))
                share = records[rank::ranks]
                # If only other ranks have samples left, this one borrows some, with weight 0, as `EpochPlan` does.
                batch = None
                if records and is_own:
                    batch = make_batch(self.collate, share or records[:2], self.dataset)
            if not records:
                if number == 0 and self.begins_anew:
                    self.state, self.begins_anew = None, False
                    yield from self
                return
            if number == 0 and ranks * workers > 1:
                mark = _mark(records[0])
            if is_own:
                yield _MicroBatch(batch, len(share), len(records), mark)

    def _begin(self, reader: int) -> tuple[Iterator[Any], OwnGenerators]:
        """Return the records of the next pass, and the dataset's own generators.

        An order that `__iter__` draws at once is the same for all readers.
        """
        seed = mix(self.seed, _STREAM, self.epoch, -1, reader)
        with random_state_unchanged():
            seed_all(seed)
            set_epoch(self.dataset, self.epoch)
            if self.state is not None:
                self.dataset.load_state_dict(self.state)
                if self.first == 0:  # its state is of the end of an epoch, and may hold that epoch's number
                    set_epoch(self.dataset, self.epoch)
            own = OwnGenerators(self.dataset, self.collate)
            own.seed(seed)
            return iter(self.dataset), own


def _mark(record: Any) -> int:
    """Return a checksum of a record, the same for equal records in any process."""
    return zlib.crc32(re.sub(r" at 0x\w+", "", repr(record)).encode())


class IterableStream(TrainStream):
    """The training data of an iterable dataset, each record once over all ranks and workers.

    Records are dealt out by position (see `_Batches`), which requires that all processes read the same records in the
    same order; or the dataset has `share(reader, readers)`, after which it reads only share `reader` (from 0) of
    `readers`. Exhausted ranks repeat their first batch with weight 0, until all have ended.

    If the dataset has `state_dict` and `load_state_dict` and is read in the main process, a resumed run continues
    at exactly the next sample. Otherwise the epoch is read again up to there: exact if the dataset repeats itself.

    Records are read one step ahead, so they may depend on the seed, the epoch and the dataset's own state, but not on
    the weights. A dataset with `reads_in_step = True` has a `__len__`, the records of an epoch, by which the last step
    is known: the records of each step are then read after the one before it is complete, and may depend on the weights.

    `debug.max_samples` are records over all readers; with `share`, rounded up for each.
    """

    is_indexed = False

    def __init__(self, dataset: Any, config: RunConfig, rank: Rank) -> None:
        self.dataset = dataset
        self.rank = rank
        self.accumulate = config.optim.accumulate
        self.batch_size = config.batch_size
        loader = config.loader
        worker = config.num_workers
        limit = config.debug.max_samples
        seed = config.dist.random_seed
        order = loader.order["type"]
        if order not in ("shuffle", "sequential"):
            raise UserError(
                f"loader.order: {kind_of(dataset)} is an iterable dataset, so it cannot be {order}; remove this key"
            )
        refuse_lost_state(dataset, worker=0)  # with workers, the epoch is read again, and the log says so
        self.samples_per_step = self.batch_size * self.accumulate * rank.world_size
        self.drop_last = loader.drop_last
        self.is_exactly_resumable = callable(getattr(dataset, "state_dict", None)) and worker == 0
        self.is_in_step = bool(getattr(dataset, "reads_in_step", False))
        if self.is_in_step:
            limit = self._set_length(worker, limit)
        collate = find_collate(dataset, loader.collate, training=True)
        self.batches = _Batches(dataset, self.batch_size, collate, seed, rank, limit)
        if self.batches.shares:
            dataset.share(rank.rank, rank.world_size)  # workers call it themselves when they begin to read
        elif (readers := rank.world_size * max(1, worker)) > 1:
            logger.info("dataset.train: each of {} readers reads all records and keeps its share", readers)
        self._state: dict[str, Any] = {}  # after the step that was yielded last
        self._start: dict[str, Any] = {}  # of the next pass; empty: as the dataset is
        self._loader = make_loader(self.batches, loader, worker, seed, rank.device, batch_size=None)
        self._first: _MicroBatch | None = None
        self._opened: Generator[_MicroBatch, None, None] | None = None  # the rest of the pass that `_first` was read in
        if self.batches.shares and not rank.is_single_process and not self.is_in_step:
            self.sample_batch(full=True)

    def _set_length(self, worker: int, limit: int) -> int:
        """Set the length of an epoch, by which its last step is known without reading ahead. Returns its records."""
        kind = kind_of(self.dataset)
        if worker:
            raise UserError(f"num_workers: {worker}, but {kind} is read in step with training: use --num_workers 0")
        try:
            size = min(len(self.dataset), limit or sys.maxsize)
        except TypeError:
            raise UserError(f"dataset.train: {kind} has reads_in_step, so needs __len__: records per epoch") from None
        self.epoch_size = size
        self.steps_per_epoch = size // self.samples_per_step if self.drop_last else -(-size // self.samples_per_step)
        if not self.steps_per_epoch:
            raise UserError(f"dataset.train: {kind} has {size} records, but a step takes {self.samples_per_step}")
        return size

    def _dataset_state(self) -> dict[str, Any]:
        # A copy: the state may be the dataset's own object, which changes with every record.
        return {"dataset": deepcopy(self.dataset.state_dict())} if self.is_exactly_resumable else {}

    def sample_batch(self, *, full: bool) -> Any:
        """Return a copy of the first batch, always a full one, to try a model on.

        The first epoch continues after it.
        """
        if self._first is None:
            set_epoch(self.dataset, 0)  # before that, a dataset may have no state
            self._start = self._start or self._dataset_state()
            self._opened = read(self._loader)
            self._first = next(self._opened, None)
        if self._first is None:
            raise self._no_samples(0)
        return deepcopy(self._first.batch)

    def samples(self, at: Position, steps: int = 1, *, everywhere: bool = False) -> list[int]:
        """Return nothing: records have no numbers."""
        return []

    def _no_samples(self, epoch: int) -> UserError:
        return UserError(
            f"dataset.train: {kind_of(self.dataset)} yielded no sample in epoch {epoch + 1}; each call of its "
            "__iter__ must start from the beginning, and every process must have something to read"
        )

    def epoch(self, at: Position) -> Iterator[Step]:
        """Yield the steps from `at` to the end of the epoch. Raises `UserError` when there are none."""
        again, before = (at.sample - self._start.get("sample", 0)) // self.samples_per_step, at
        if again:
            logger.warning("the dataset cannot restore its position: reading {} steps again to reach it", again)
        steps = islice(self._steps(at), again, None)
        with until_signal(is_alone=self.rank.is_single_process):
            # One step is read ahead to detect the last one; a checkpoint holds the state from before that read.
            for current, ahead in ((step, step) for step in steps) if self.is_in_step else pairwise(steps):
                if not current.total:
                    raise UserError(_TOO_SHORT.format(kind_of(self.dataset), at.sample, self.epoch_size))
                sample = at.sample + self.samples_per_step
                is_last = not ahead.total
                if self.is_in_step:
                    is_last = sample // self.samples_per_step == self.steps_per_epoch
                at = Position(at.step + 1, at.epoch + is_last, 0 if is_last else sample, self.epoch_size)
                self._state = {**(ahead if ahead.state["ended"] else current).state, "sample": at.sample}
                sizes = [batch.size for batch in current.batches]
                weights = [size * self.rank.world_size / current.total for size in sizes]
                global_batch = GlobalBatch([], weights, sizes, current.total, at)
                yield Step([micro.batch for micro in current.batches], global_batch)
                if is_last:
                    return
            if at == before:
                raise self._no_samples(at.epoch)

    def _steps(self, at: Position) -> Iterator[_Read]:
        """Yield the data of each step from `at` to the end of the epoch, and of a last one that has none."""
        batches, marks, total = self._pass(at), set(), 1
        while total:
            read = list(islice(batches, self.accumulate))
            state = {**self._dataset_state(), "ended": not read}
            if self.batches.shares:
                sizes = gather_objects([batch.size for batch in read], self.rank)
                total = sum(map(sum, sizes))
                missing = max(map(len, sizes)) - len(read)
                if self.is_in_step and len(set(map(len, sizes))) > 1:
                    raise UserError(_TOO_SHORT.format(kind_of(self.dataset), "fewer", "others' shares"))
                read += [_MicroBatch(self.sample_batch(full=True), 0, 0, 0) for _ in range(missing)]
            else:
                total = sum(batch.total for batch in read)
                marks |= {batch.mark for batch in read}
                seen_here = total + sum(marks)
                if len(marks) > 1 or seen_here != max_over_ranks(seen_here, self.rank):
                    raise UserError(_DIFFERENT_RECORDS.format("workers" if len(marks) > 1 else "ranks"))
            if total in (0, self.samples_per_step) or not self.drop_last:
                yield _Read(read, total, state)

    def _pass(self, at: Position) -> Iterator[_MicroBatch]:
        """This process' micro-batches of the epoch, from `at` if its state was restored, else from the start."""
        opened, self._opened = self._opened, None
        start, self._start = self._start, {}
        sample = start.get("sample", 0)
        if opened is not None and self._first is not None:
            if at.epoch == sample == 0:
                return chain([self._first], opened)
            opened.close()
        self.batches.epoch, self.batches.first = at.epoch, sample // (self.batch_size * self.rank.world_size)
        self.batches.state = start.get("dataset")
        self.batches.begins_anew = self.batches.state is not None or self.is_in_step
        if sample and start["ended"]:
            self.dataset.load_state_dict(self.batches.state)
            return iter(())
        return read(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's state after the last step; one per rank if it has `share`."""
        return {"states": gather_objects(self._state, self.rank) if self.batches.shares else [self._state]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next pass at the saved position. Raises `UserError` if the number of shares differs inside one."""
        states = state["states"]
        if not all({"dataset", "sample"} <= state.keys() for state in states) or not self.is_exactly_resumable:
            return  # the epoch is read again
        if self.batches.shares and len(states) != self.rank.world_size:
            if all(state.get("ended") for state in states):  # between epochs: every share starts over
                return
            raise UserError(
                f"dataset.train: {kind_of(self.dataset)} was shared by {len(states)} process(es) when the "
                f"checkpoint was saved inside an epoch, so resume it with as many, not {self.rank.world_size}"
            )
        self._start = states[self.rank.rank if self.batches.shares else 0]
        self._state = deepcopy(self._start)  # a run may be saved again before its first step
