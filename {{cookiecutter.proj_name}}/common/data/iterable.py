"""Training data that is only known by reading it: streams, generated samples, data sets without length."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch.utils.data import DataLoader, IterableDataset

from common.data.fork import check_fork
from common.data.keyed import find_collate, seed_all
from common.data.loader import LoaderConfig, Step, checked
from common.data.move import batch_length
from common.data.plan import Window
from common.data.workers import WorkerStart, opened
from common.distributed import Rank, max_over_ranks
from common.errors import UserError
from common.period import Position
from common.seed import mix

_STREAM = 2  # tells the keys of an iterable's batches from those of samples


class _Batches(IterableDataset[Any]):
    """Cuts an iterable into batches, each read with random streams that depend on its number alone."""

    def __init__(self, dataset: Any, batch_size: int, collate: Any, seed: int) -> None:
        self.dataset, self.batch_size, self.collate, self.seed = dataset, batch_size, collate, seed
        self.epoch = self.number = 0

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.dataset)
        while batch := self._next(items):
            yield batch[0]

    def _next(self, items: Iterator[Any]) -> list[Any]:
        """The next batch in a list; an empty list at the end."""
        info = torch.utils.data.get_worker_info()
        saved = None if info else (random.getstate(), np.random.get_state(), torch.get_rng_state())
        try:
            seed_all(mix(self.seed, _STREAM, self.epoch, self.number, info.id if info else 0))
            self.number += 1
            found = [item for _, item in zip(range(self.batch_size), items, strict=False)]
            return [self.collate(found)] if found else []
        except UserError as error:
            return [error]
        finally:
            if saved is not None:
                random.setstate(saved[0])
                np.random.set_state(saved[1])
                torch.set_rng_state(saved[2])


class IterableStream:
    """The training data of an iterable data set, each rank reading its own.

    Where the data set has `state_dict` and `load_state_dict` and is read in the main process, a resumed run goes on at
    the very sample. Otherwise the epoch is read again up to that place: exact if the data set repeats itself. Ranks
    count alike in the last step of an epoch, even if one of them has fewer samples for it.
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
        self._batches = _Batches(dataset, batch_size, find_collate(dataset, config.collate), seed)
        self._has_state = callable(getattr(dataset, "state_dict", None)) and worker == 0
        self._state: dict[str, Any] = {}
        self._restored = False
        self._loader: DataLoader[Any] = DataLoader(
            self._batches,
            batch_size=None,
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
    def window(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.batch_size * self.accumulate * self.rank.world_size

    @property
    def restores_its_place(self) -> bool:
        return self._has_state

    def sample_batch(self, *, full: bool) -> Any:
        """A batch to try a model on."""
        size = self.batch_size if full else 2
        return self._batches.collate([item for _, item in zip(range(size), iter(self.dataset), strict=False)])

    def samples(self, at: Position) -> list[list[int]]:
        """What is only read in order has no numbers."""
        return []

    def epoch(self, at: Position) -> Iterator[Step]:
        """The steps from `at` to the end of the epoch, which comes when the first rank has read all of its data."""
        batches = self._opened(at)
        step, sample = at.step, at.sample
        ahead, self._state = self._take(batches)
        while ahead:
            window, state = ahead, self._state
            # Looked at one window ahead, to know the last one; what is saved is the state before that look.
            ahead, after_ahead = self._take(batches)
            self._state = state
            step, sample = step + 1, sample + self.window
            place = Position(step, at.epoch, sample, 0) if ahead else Position(step, at.epoch + 1, 0, 0)
            if not ahead:
                self._state = {}
            sizes = [batch_length(batch) for batch in window]
            total = sum(sizes)
            weights = [size / total for size in sizes]
            # Where other ranks have a micro-batch more, this one repeats its last, with weight 0; see `EpochPlan.keys`.
            borrowed = max_over_ranks(len(sizes), self.rank) - len(sizes) if self.accumulate > 1 else 0
            window, sizes = window + window[-1:] * borrowed, sizes + sizes[-1:] * borrowed
            yield Step(window, Window(weights + [0.0] * borrowed, sizes, total * self.rank.world_size, place))
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

    def _take(self, batches: Iterator[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The micro-batches of a window, none when any rank has run out, and the data set's state after them."""
        found = [batch for _, batch in zip(range(self.accumulate), batches, strict=False)]
        if max_over_ranks(int(not found), self.rank):
            found = []
        state = {"dataset": self.dataset.state_dict(), "number": self._batches.number} if self._has_state else {}
        return found, state

    def close(self) -> None:
        """Nothing will be read any more."""

    def state_dict(self) -> dict[str, Any]:
        """The data set's own state after the last step; empty between epochs, and for one that has none."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next epoch go on at the saved place."""
        if state and self._has_state:
            self.dataset.load_state_dict(state["dataset"])
            self._restored = True
