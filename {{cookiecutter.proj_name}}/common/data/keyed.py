"""Batches whose randomness is a function of (seed, epoch, sample index), whichever process reads them.

Ordinary transforms draw from the global generators of Python, NumPy and PyTorch. Seeding the three before each item
makes them depend on the item alone: not on the number of workers or ranks, nor on where a run was resumed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import default_collate

from common.base.errors import UserError
from common.config.registry import COLLATE_REGISTRY
from common.data.held import OwnGenerators
from common.data.view import kind_of
from common.distributed.seed import mix, random_state_unchanged, seed_all

# (epoch, sample indices) of a micro-batch. Together with the seed, it determines the randomness of the items.
BatchKey = tuple[int, list[int]]
Collate = Callable[[list[Any]], Any]
_SHOWN = 8  # sample numbers in a message
_BATCH = 1  # distinguishes the key of a batch (collate functions may draw too) from the keys of its items


class SizedDataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class KeyedBatches:
    """Turns the key of a batch into the collated batch; a `DataLoader` calls it in its workers.

    A dataset that sets `random = False` promises that neither its items nor its own collate function draw random
    numbers, and is not seeded (which takes 7 microseconds per sample, and 70 per batch).
    """

    def __init__(self, dataset: SizedDataset, collate: Collate, seed: int) -> None:
        self.dataset = dataset
        self.size = len(dataset)
        self.collate = collate
        self.seed = seed
        promised = collate in (default_collate, getattr(dataset, "collate", None))
        self.random = bool(getattr(dataset, "random", True) or getattr(collate, "random", not promised))
        self.epoch: int | None = None  # last passed to this process' dataset
        self.restored: Any = None  # the dataset's state within an epoch, which `set_epoch` may not change
        self._own = OwnGenerators()

    def __getitems__(self, key: BatchKey) -> Any:
        epoch, indices = key
        if not self.random:
            return make_batch(self.collate, self.items(epoch, indices), self.dataset, indices)
        is_first = epoch != self.epoch
        with random_state_unchanged():
            items = self.items(epoch, indices)
            self._seed(mix(self.seed, epoch, indices[0], _BATCH))
            batch = make_batch(self.collate, items, self.dataset, indices)
        if is_first and self._finds_more():  # generators that `collate` made: read again, seeded
            return self.__getitems__(key)
        return batch

    def items(self, epoch: int, indices: list[int]) -> list[Any]:
        """Read samples of an epoch, which draws from the global generators."""
        is_first = epoch != self.epoch
        if is_first:
            self.epoch = epoch
            self._begin(epoch)
        dataset = self.dataset
        size = self.size
        is_random = self.random
        items: list[Any] = []
        try:
            for index in indices:  # a repeated sample has a different index each time, equal modulo `size`
                if is_random:
                    self._seed(mix(self.seed, epoch, index))
                items.append(dataset[index % size])
        except UserError:
            raise
        except Exception as error:
            name = f"sample {index % size} of {kind_of(dataset)}"
            raise RuntimeError(f"{name} cannot be read: {type(error).__name__}: {error}") from error
        if is_first and is_random and self._finds_more():  # generators that samples made: read again, seeded
            return self.items(epoch, indices)
        return items

    def _begin(self, epoch: int) -> None:
        """Pass on the epoch: what the dataset draws then depends on nothing else."""
        if self.random:
            self._finds_more()
        with random_state_unchanged():
            self._seed(mix(self.seed, epoch))
            set_epoch(self.dataset, epoch)
        if self.restored is not None:
            self.dataset.load_state_dict(self.restored)  # type: ignore[attr-defined]
            self.restored = None
        if self.random:
            self._finds_more()

    def _finds_more(self) -> bool:
        """Look for generators of the dataset's own. Returns whether there are more than before."""
        known = len(self._own.names)
        self._own = OwnGenerators(self.dataset, self.collate)
        return len(self._own.names) > known

    def _seed(self, seed: int) -> None:
        seed_all(seed)
        if self._own.names:
            self._own.seed(seed)


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call `dataset.set_epoch(epoch)` if there is such a method. Call this in the process that reads."""
    method = getattr(dataset, "set_epoch", None)
    if callable(method):
        method(epoch)


def find_collate(
    dataset: SizedDataset,
    spec: str | Mapping[str, Any] | None,
    *,
    training: bool = False,
) -> Collate:
    """Find what `loader.collate` names, else the dataset's `collate` or `collate_fn`, else PyTorch's default.

    A class is built, with the dataset as its argument `dataset`. One whose attribute `training_only` is true (mixup)
    is used in training alone.
    """
    if isinstance(spec, str):
        spec = {"type": spec}
    if spec is not None:
        only_training = getattr(COLLATE_REGISTRY.get(spec["type"]), "training_only", False)
        if training or not only_training:
            return COLLATE_REGISTRY.build(spec, dataset=dataset)
    own = getattr(dataset, "collate", None) or getattr(dataset, "collate_fn", None)
    # `InMemoryDataset.collate` of torch_geometric makes no batch, but the form in which it stores all graphs.
    if own is None or getattr(own, "__module__", "").startswith("torch_geometric."):
        return default_collate
    return own


def make_batch(
    collate: Collate,
    items: list[Any],
    dataset: Any,
    indices: Sequence[int] = (),
) -> Any:
    """Make a batch of items of a dataset; a stream has no `indices`.

    Raises `UserError` if PyTorch's default cannot make one, or if it is None.
    """
    try:
        first = items[0]
        if collate is default_collate and isinstance(first, Mapping):
            for item in items:
                if len(item) != len(first):  # PyTorch would drop what only later ones have
                    raise KeyError(*item.keys() ^ first.keys())
        batch = collate(items)
    except Exception as error:
        if collate is not default_collate or re.search("open files|memory", str(error)):  # the machine's
            raise
        names = "records"
        if indices:
            numbers = [str(index % len(dataset)) for index in indices[:_SHOWN]]
            names = f"samples {', '.join(numbers)}"
            if len(indices) > _SHOWN:
                names += ", ..."
        raise UserError(
            f"no batch can be made of {names} of {kind_of(dataset)}: {type(error).__name__}: {error}; all samples of a "
            "batch need the same entries and shapes, or a loader.collate of your own"
        ) from error
    if batch is None:
        raise UserError(f"the collate function of {kind_of(dataset)} returned None; it must return a batch")
    return batch
