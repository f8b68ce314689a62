"""Training data that can only be read in sequence: streams, generated samples, data sets without a length."""

import re
import zlib
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from loguru import logger
from torch.utils.data import IterableDataset

from common.base.errors import UserError
from common.data.keyed import find_collate, loop_streams_unchanged, seed_all
from common.data.loader import BatchStream, LoaderConfig, Step, make_loader, read
from common.data.plan import GlobalBatch
from common.distributed import Rank, gather_objects, max_over_ranks
from common.distributed.seed import mix
from common.progress import Position

_STREAM = 2  # distinguishes the keys of an iterable's batches from those of samples
_DIFFERENT_RECORDS = (
    "dataset.train: rank {} reads other records than another rank, so they cannot be dealt out. Let the data set read "
    "the same on every process, or give it a method share(reader, readers), with which it reads a share of its own; "
    "see Data in README.md"
)


class _MicroBatch(NamedTuple):
    """A micro-batch of this process; all ranks compute theirs at the same time."""

    batch: Any
    size: int  # samples that count; 0 if all of them are borrowed or repeated
    total: int  # samples over all ranks
    mark: int  # checksum of the epoch's first record, which should be equal on all ranks; else 0


class _Batches(IterableDataset[Any]):
    """Cuts an iterable into micro-batches, each read with random streams seeded by its number.

    Each reader reads all records and keeps its own: the records of a batch are dealt to the ranks one by one, and the
    workers of a rank take its micro-batches in turn. So micro-batches are the same with any number of workers. A data
    set with `share` gives each reader different records, and the reader keeps them all.
    """

    def __init__(self, dataset: Any, batch_size: int, collate: Any, seed: int, rank: Rank) -> None:
        self.dataset, self.batch_size, self.collate, self.seed = dataset, batch_size, collate, seed
        self.rank, self.ranks = rank.rank, rank.world_size
        self.shares = callable(getattr(dataset, "share", None))
        self.epoch = self.first = 0  # where the next pass begins: epoch, and number of the micro-batch

    def __iter__(self) -> Iterator[_MicroBatch]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, ranks, reader = self.rank, self.ranks, 0
        if self.shares:
            reader = rank * workers + worker
            if info:
                self.dataset.share(reader, ranks * workers)
            rank, ranks, worker, workers = 0, 1, 0, 1  # each reader keeps all that it reads
        elif info:
            # A data set that shards itself by get_worker_info() would skip records; here every worker must read all.
            torch.utils.data._utils.worker._worker_info = None
        source = iter(self.dataset)
        for number in count(self.first):
            is_own = number % workers == worker
            with loop_streams_unchanged():
                seed_all(mix(self.seed, _STREAM, self.epoch, number, reader))
                records = list(islice(source, self.batch_size * ranks))
                own = records[rank::ranks]
                # If only other ranks have samples left, this one borrows some, with weight 0, as `EpochPlan` does.
                batch = self.collate(own or records[:2]) if records and is_own else None
            if not records:
                return
            if is_own:
                mark = _mark(records[0]) if number == 0 and ranks > 1 else 0
                yield _MicroBatch(batch, len(own), len(records) * self.ranks // ranks, mark)


def _mark(record: Any) -> int:
    """A checksum of a record, the same for equal records in any process."""
    return zlib.crc32(re.sub(r" at 0x\w+", "", repr(record)).encode())


class IterableStream(BatchStream):
    """The training data of an iterable data set, each record once over all ranks and workers.

    Records are dealt out by position (see `_Batches`), which requires that all processes read the same records in the
    same order; or the data set has `share(reader, readers)`, after which it reads only share `reader` (from 0) of
    `readers`. Ranks then have equal weight in the last step of an epoch, even if one of them has fewer samples for it,
    and the epoch ends when the first rank has read its whole share.

    If the data set has `state_dict` and `load_state_dict` and is read in the main process, a resumed run continues
    at exactly the next sample. Otherwise the epoch is read again up to there: exact if the data set repeats itself.
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
        self.samples_per_step = batch_size * accumulate * rank.world_size
        self._has_state = callable(getattr(dataset, "state_dict", None))
        self.is_exactly_resumable = self._has_state and worker == 0
        self._batches = _Batches(dataset, batch_size, find_collate(dataset, config.collate, training=True), seed, rank)
        self._shares = self._batches.shares
        if self._shares:
            dataset.share(rank.rank, rank.world_size)  # workers call it themselves when they begin to read
        elif (readers := rank.world_size * max(1, worker)) > 1:
            logger.info("dataset.train: each of {} readers reads all records and keeps its share", readers)
        self._state: dict[str, Any] = {}  # state of the data set after the step that was yielded last
        self._restored = False
        self._loader = make_loader(self._batches, config, worker, seed, rank.device, batch_size=None)

    def sample_batch(self, *, full: bool) -> Any:
        """A batch to try a model on. A data set that can save its state is restored afterwards."""
        state = self.dataset.state_dict() if self._has_state else None
        records = list(islice(iter(self.dataset), self.batch_size if full else 2))
        if not records:
            raise self._no_samples(0)
        if self._has_state:
            self.dataset.load_state_dict(state)
        return self._batches.collate(records)

    def _no_samples(self, epoch: int) -> UserError:
        return UserError(
            f"dataset.train: {type(self.dataset).__name__} gave no sample in epoch {epoch + 1}; each call of its "
            "__iter__ must start from the beginning, and every process must have something to read"
        )

    def epoch(self, at: Position) -> Iterator[Step]:
        """The steps from `at` to the end of the epoch. Raises `UserError` when there are none."""
        steps = self._steps(at)
        ahead = next(steps, None)
        if ahead is None:
            raise self._no_samples(at.epoch)
        while ahead is not None:
            # One step is read ahead to detect the last one; a checkpoint holds the state from before that read.
            (current, state), ahead = ahead, next(steps, None)
            self._state = state if ahead else {}
            at = Position(at.step + 1, at.epoch, at.sample + self.samples_per_step)
            if ahead is None:
                at = Position(at.step, at.epoch + 1)
            sizes, total = [each.size for each in current], sum(each.total for each in current)
            weights = [size * self.rank.world_size / total for size in sizes]
            yield Step([each.batch for each in current], GlobalBatch([], weights, sizes, total, at))

    def _steps(self, at: Position) -> Iterator[tuple[list[_MicroBatch], dict[str, Any]]]:
        """The micro-batches of each step from `at` to the end of the epoch, and the data set's state after them."""
        done = at.sample // (self.batch_size * self.rank.world_size)
        restored, self._restored = self._restored, False
        self._batches.epoch, self._batches.first = at.epoch, done if restored else 0
        batches = read(self._loader)
        if done and not restored:
            logger.warning("the data set cannot restore its position: reading {} batches again to reach it", done)
            next(islice(batches, done, done), None)
        while True:
            found = list(islice(batches, self.accumulate))
            if self._shares:
                if max_over_ranks(int(not found), self.rank):
                    return
                # If other ranks have more micro-batches, this one repeats its last, with weight 0.
                missing = max_over_ranks(len(found), self.rank) - len(found)
                found += [found[-1]._replace(size=0, total=0)] * missing
            else:
                read_here = sum(each.total + each.mark for each in found)
                if read_here != max_over_ranks(read_here, self.rank):
                    raise UserError(_DIFFERENT_RECORDS.format(self.rank.rank))
                if not found:
                    return
            yield found, {"dataset": self.dataset.state_dict()} if self.is_exactly_resumable else {}

    def state_dict(self) -> dict[str, Any]:
        """The data set's state after the last step; one per rank if it has `share`. Empty between epochs."""
        return {"states": gather_objects(self._state, self.rank) if self._shares else [self._state]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next epoch at the saved position. Raises `UserError` if the number of shares differs."""
        states = state["states"]
        if not any(states) or not self.is_exactly_resumable:
            return
        if self._shares and len(states) != self.rank.world_size:
            raise UserError(
                f"dataset.train: {type(self.dataset).__name__} was shared by {len(states)} process(es) when the "
                f"checkpoint was saved inside an epoch, so it is resumed with as many, not {self.rank.world_size}"
            )
        self.dataset.load_state_dict(states[self.rank.rank if self._shares else 0]["dataset"])
        self._restored = True
