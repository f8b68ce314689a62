"""The order of an epoch's training samples: a function of seed and epoch that `loader.order` names."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt

from common.base.errors import UserError
from common.config.registry import ORDER_REGISTRY
from common.data.keyed import loop_streams_unchanged, seed_all
from common.data.plan import shuffled
from common.distributed.seed import mix


class EpochOrder:
    """The samples of each epoch, by a function `(size, seed, epoch, dataset) -> indices`, called with these.

    It may leave out samples and repeat others, but every epoch must have as many. Calls with the same arguments must
    return the same indices, in any process: from the global generators, which are seeded, or without randomness.

    Attributes:
        size: samples of an epoch.
    """

    def __init__(self, section: Mapping[str, Any], dataset: Any, seed: int) -> None:
        self.dataset, self.seed, self.name = dataset, seed, section["type"]
        self._function = ORDER_REGISTRY.build(section)
        self._latest = 0, self._indices(0)
        self.size = len(self._latest[1])

    def __call__(self, epoch: int) -> np.ndarray:
        """Shape (size,); a sample's second occurrence has the number index + len(dataset), its third 2 * len, ...

        So each occurrence has random numbers of its own.
        """
        if self._latest[0] != epoch:
            self._latest = epoch, self._indices(epoch)
        return self._latest[1]

    def _indices(self, epoch: int) -> np.ndarray:
        size = len(self.dataset)
        with loop_streams_unchanged():
            seed_all(mix(self.seed, epoch))
            order = np.asarray(self._function(size, self.seed, epoch, self.dataset))
        problem = ""
        if order.ndim != 1 or not len(order) or order.dtype.kind not in "iu":
            problem = f"an array of shape {order.shape} and type {order.dtype}, not a list of indices"
        elif order.min() < 0 or order.max() >= size:
            problem = f"indices from {order.min()} to {order.max()}, but the data set has {size} samples"
        elif epoch and len(order) != self.size:
            problem = f"{len(order)} samples, but {self.size} in the first; the length of an epoch must not change"
        if problem:
            raise UserError(f"loader.order: {self.name} returned, for epoch {epoch + 1}, {problem}")
        if np.bincount(order).max() == 1:
            return order
        by_index = np.argsort(order, kind="stable")
        occurrence = np.empty_like(order)
        occurrence[by_index] = np.arange(len(order)) - np.searchsorted(order[by_index], order[by_index])
        return order + size * occurrence


@ORDER_REGISTRY.register()
def shuffle(size: int, seed: int, epoch: int, dataset: Any) -> np.ndarray:
    """Each sample once, in an order that is new in each epoch."""
    return shuffled(size, seed, epoch)


@ORDER_REGISTRY.register()
def sequential(size: int, seed: int, epoch: int, dataset: Any) -> np.ndarray:
    """Each sample once, in the order of the data set."""
    return np.arange(size)


@ORDER_REGISTRY.register()
def weighted(size: int, seed: int, epoch: int, dataset: Any, samples: PositiveInt | None = None) -> np.ndarray:
    """Samples drawn with replacement, with probabilities in proportion to the data set's `weights`.

    `samples`: how many per epoch; by default as many as the data set has.
    """
    weights = _of_each_sample(dataset, "weighted", "weights").astype(np.float64)
    sums = np.cumsum(weights)
    if not np.isfinite(weights).all() or weights.min() < 0 or sums[-1] <= 0:
        raise UserError("loader.order: weights must be finite and not negative, and their sum greater than 0")
    drawn = torch.rand(samples or size, dtype=torch.float64).numpy() * sums[-1]
    return np.searchsorted(sums, np.minimum(drawn, np.nextafter(sums[-1], 0)), side="right")


@ORDER_REGISTRY.register()
def balanced(size: int, seed: int, epoch: int, dataset: Any, samples: PositiveInt | None = None) -> np.ndarray:
    """Samples of all classes equally often: some of a large class, and those of a small one several times.

    The data set gives the class of each sample as `targets` or `labels`. Numbers of samples per class, and of
    repetitions within a class, differ by one at most. `samples`: how many per epoch; by default as many as the data
    set has.
    """
    classes, labels = np.unique(_of_each_sample(dataset, "balanced", "targets", "labels"), return_inverse=True)
    count, more = divmod(samples or size, len(classes))
    chosen = []
    for place, number in enumerate(torch.randperm(len(classes)).tolist()):
        members = np.flatnonzero(labels == number)
        chosen.append(np.resize(members[torch.randperm(len(members)).numpy()], count + (place < more)))
    return np.concatenate(chosen)[torch.randperm(samples or size).numpy()]


def _of_each_sample(dataset: Any, order: str, *names: str) -> np.ndarray:
    """A value per sample: the first of the attributes or methods `names` that the data set has."""
    kind = type(getattr(dataset, "whole", dataset)).__name__
    for name in names:
        if (found := getattr(dataset, name, None)) is not None:
            values = np.asarray(found() if callable(found) else found)
            if values.shape != (expected := (len(getattr(dataset, "whole", dataset)),)):
                raise UserError(f"loader.order: {name} of {kind} has the shape {values.shape}, not {expected}")
            return values[: len(dataset)]
    raise UserError(f"loader.order: {order} needs an attribute or method {' or '.join(names)} of {kind}")
