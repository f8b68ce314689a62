"""Batches whose randomness is a function of (seed, epoch, sample index), whichever process reads them.

Ordinary transforms draw from the global generators of Python, NumPy and PyTorch. Seeding the three before each item
makes them depend on the item alone: not on the number of workers or ranks, nor on where a run was resumed.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Number
from operator import length_hint
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from common.base.errors import UserError
from common.config.arguments import parameter_names
from common.config.registry import COLLATE_REGISTRY
from common.data.held import OwnGenerators
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
        self._own = OwnGenerators()
        self._is_first = False  # whether the next sample is the first one of an epoch, in this process

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: it finds what its copy of the dataset holds itself."""
        return {**vars(self), "epoch": None, "_own": OwnGenerators()}

    def __getitems__(self, key: BatchKey) -> Any:
        epoch, indices = key
        if not self.random:
            return make_batch(self.collate, self.items(epoch, indices), partial(self._name, indices))
        with loop_streams_unchanged():
            items = self.items(epoch, indices)
            self._seed(mix(self.seed, epoch, indices[0], _BATCH))
            return make_batch(self.collate, items, partial(self._name, indices))

    def _name(self, indices: list[int], number: int) -> str:
        return f"sample {indices[number] % self.size} of {kind_of(self.dataset)}"

    def items(self, epoch: int, indices: list[int]) -> list[Any]:
        """Read samples of an epoch, which draws from the global generators."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._begin(epoch)
        # A sample that an epoch has several times is numbered differently each time, see `EpochOrder`.
        dataset, size, left, items = self.dataset, self.size, iter(indices), []
        try:
            if not self.random:
                return [dataset[index % size] for index in left]
            for index in left:
                self._seed(mix(self.seed, epoch, index))
                items.append(dataset[index % size])
                if self._is_first and self._finds_more():  # a new generator: read again, seeded
                    self._seed(mix(self.seed, epoch, index))
                    items[-1] = dataset[index % size]
                self._is_first = False
        except UserError:
            raise
        except Exception as error:
            kind, number = kind_of(dataset), indices[-1 - length_hint(left)] % size
            raise RuntimeError(f"sample {number} of {kind} cannot be read: {type(error).__name__}: {error}") from error
        return items

    def _begin(self, epoch: int) -> None:
        """Pass on the epoch: what the dataset draws then depends on nothing else."""
        if self.random:
            self._finds_more()
            self._seed(mix(self.seed, epoch))
        set_epoch(self.dataset, epoch)
        if self.random:
            self._finds_more()
            self._is_first = True

    def _finds_more(self) -> bool:
        """Look for generators of the dataset's own. Returns whether there are more than before."""
        known, self._own = self._own, OwnGenerators(self.dataset, self.collate)
        return len(self._own.names) > len(known.names)

    def _seed(self, seed: int) -> None:
        seed_all(seed)
        if self._own.names:
            self._own.seed(seed)


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


def make_batch(collate: Callable[[list[Any]], Any], items: list[Any], name: Callable[[int], str]) -> Any:
    """Make a batch.

    Args:
        name: what an item is called in an error, by its number in the batch.

    Raises:
        UserError: it is None; or PyTorch's default cannot make one of these items, or would drop an entry that only
            some have.
    """
    if collate is not default_collate:
        batch = collate(items)
        if batch is None:
            raise UserError(f"the collate function returned None for {name(0)} and the others; it must return a batch")
        return batch
    try:
        if not _same_keys(items):
            raise ValueError("some samples have entries that others lack")
        return collate(items)
    except Exception as error:
        reason = misfit(items, [name(number) for number in range(len(items))])
        if not reason:
            raise
        raise UserError(
            f"{reason}; all samples of a batch need the same entries and shapes (dataset.*.transforms can resize), or "
            "a loader.collate of your own"
        ) from error


def _same_keys(values: Sequence[Any]) -> bool:
    """Return whether dicts, also inside of others, have as many entries as the first one.

    PyTorch's default collate function drops what only later ones have.
    """
    first = values[0]
    columns: Iterable[Sequence[Any]] = ()
    if isinstance(first, Mapping):
        if any(len(value) != len(first) for value in values):
            return False
        columns = [[value[key] for value in values] for key in first]
    elif isinstance(first, (list, tuple)):
        columns = zip(*values, strict=True)
    return all(_same_keys(column) for column in columns if isinstance(column[0], (Mapping, list, tuple)))


def misfit(values: Sequence[Any], names: Sequence[str]) -> str:
    """Name the first sample that does not fit to the first one; "" if all fit.

    Args:
        values: the samples, or the same entry of each.
        names: of the values, such as `sample 7` or `label of sample 7`.
    """
    first, shape = values[0], _shape(values[0])
    for value, name in zip(values, names, strict=True):
        if value is None:
            return f"{name} is None"
        if _shape(value) != shape:
            return f"{name} is {_shape(value)}, but {names[0]} is {shape}"
        if isinstance(first, Mapping) and first.keys() != value.keys():
            key = sorted(first.keys() ^ value.keys(), key=str)[0]
            has, lacks = (names[0], name) if key in first else (name, names[0])
            return f"{lacks} has no {key!r}, but {has} has"
    if isinstance(first, (Tensor, np.ndarray, Number, str)):
        return ""
    if not isinstance(first, (Mapping, list, tuple)):
        return f"{names[0]} is {shape}, but a batch is made of tensors, arrays, numbers and text"
    entries = first if isinstance(first, Mapping) else range(len(first))
    found = (misfit([value[key] for value in values], [f"{key} of {name}" for name in names]) for key in entries)
    return next(filter(None, found), "")


def _shape(value: Any) -> str:
    """Describe what a batch needs to be the same in all samples."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return "a number" if isinstance(value, Number) else f"a {type(value).__name__}"
