"""Batches whose randomness is a function of (seed, epoch, sample index), whichever process reads them.

Ordinary transforms draw from the global generators of Python, NumPy and PyTorch. Seeding the three before each item
makes them depend on the item alone: not on the number of workers or ranks, nor on where a run was resumed.
"""

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import length_hint
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from common.base.errors import UserError
from common.config.arguments import parameter_names
from common.config.registry import COLLATE_REGISTRY
from common.data.view import kind_of
from common.distributed.seed import mix, random_state_unchanged

# (epoch, sample indices) of a micro-batch. Together with the seed, it determines the randomness of the items.
BatchKey = tuple[int, list[int]]
Collate = Callable[[list[Any]], Any]
_BATCH = 1  # distinguishes the key of a batch (collate functions may draw too) from the keys of its items


class SizedDataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class KeyedBatches:
    """Turns the key of a batch into the collated batch; a `DataLoader` calls it in its workers.

    A dataset that sets `random = False` promises that neither its items nor its collate function draw random numbers,
    and is not seeded (which takes 7 microseconds per sample, and 70 per batch in the main process).
    """

    def __init__(self, dataset: SizedDataset, collate: Collate, seed: int) -> None:
        self.dataset, self.size = dataset, len(dataset)
        self.collate = collate
        self.seed = seed
        self.random = bool(getattr(dataset, "random", True) or getattr(collate, "random", False))
        self.epoch: int | None = None  # last passed to this process' dataset

    def __getitems__(self, key: BatchKey) -> Any:
        epoch, indices = key
        if epoch != self.epoch:
            set_epoch(self.dataset, epoch)
            self.epoch = epoch
        if not self.random:
            return self.collate(self._items(epoch, indices))
        with loop_streams_unchanged():
            items = self._items(epoch, indices)
            seed_all(mix(self.seed, epoch, indices[0], _BATCH))
            return self.collate(items)

    def _items(self, epoch: int, indices: list[int]) -> list[Any]:
        # A sample that an epoch has several times is numbered differently each time, see `EpochOrder`.
        dataset, size, left, items = self.dataset, self.size, iter(indices), []
        try:
            if not self.random:
                return [dataset[index % size] for index in left]
            for index in left:
                seed_all(mix(self.seed, epoch, index))
                items.append(dataset[index % size])
        except UserError:
            raise
        except Exception as error:
            kind, number = kind_of(dataset), indices[-1 - length_hint(left)] % size
            raise RuntimeError(f"sample {number} of {kind} cannot be read: {type(error).__name__}: {error}") from error
        return items


def loop_streams_unchanged() -> AbstractContextManager[None]:
    """Restore the global generators on exit: reading data leaves the training loop's numbers (dropout) unchanged.

    Does nothing in a worker process, which has no training loop.
    """
    return random_state_unchanged() if torch.utils.data.get_worker_info() is None else nullcontext()


def seed_all(seed: int) -> None:
    """Seed the three global CPU generators. Not `torch.manual_seed`, which would touch CUDA in forked workers."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call `dataset.set_epoch(epoch)` if there is such a method. Call this in the process that reads."""
    if callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(epoch)


def find_collate(dataset: SizedDataset, spec: str | Mapping[str, Any] | None, *, training: bool = False) -> Collate:
    """Find the collate function that `loader.collate` names, else the dataset's `collate`, else PyTorch's default.

    A class is built, with the dataset as its argument `dataset`. One whose attribute `training_only` is true (mixup)
    is used in training alone.
    """
    if spec is not None:
        section = {"type": spec} if isinstance(spec, str) else spec
        target = COLLATE_REGISTRY.get(section["type"])
        if training or not getattr(target, "training_only", False):
            built = not isinstance(spec, str) or "dataset" in parameter_names(target)
            return COLLATE_REGISTRY.build(section, dataset=dataset) if built else target
    collate = getattr(dataset, "collate", None)
    return collate if callable(collate) else default_collate
