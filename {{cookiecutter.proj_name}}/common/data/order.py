"""The order of an epoch's training samples: a function of seed and epoch that `loader.order` names."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from common.base.errors import UserError
from common.config.registry import ORDER_REGISTRY
from common.data.keyed import loop_streams_unchanged, seed_all, set_epoch
from common.data.view import kind_of
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
        self._samples = len(dataset)
        self._function = ORDER_REGISTRY.build(section)
        self._latest = 0, self._indices(0)
        self.size = len(self._latest[1])

    def __call__(self, epoch: int) -> np.ndarray[Any, Any]:
        """Shape (size,); a sample's second occurrence has the number index + len(dataset), its third 2 * len, ...

        So each occurrence has random numbers of its own.
        """
        if self._latest[0] != epoch:
            self._latest = epoch, self._indices(epoch)
        return self._latest[1]

    def _indices(self, epoch: int) -> np.ndarray[Any, Any]:
        size = self._samples
        with loop_streams_unchanged():
            seed_all(mix(self.seed, epoch))
            set_epoch(self.dataset, epoch)
            if len(self.dataset) != size:
                kind, now = kind_of(self.dataset), len(self.dataset)
                rule = f"the length of {kind} changed from {size} to {now} in epoch {epoch + 1}; it must stay the same"
                raise UserError(f"{rule}: let its set_epoch, or what else changes it, form as many items in each epoch")
            given = self._function(size, self.seed, epoch, self.dataset)
        try:
            order = np.asarray(given)
        except ValueError:  # lists of different lengths
            order = np.empty((0, 0))
        problem = ""
        if order.ndim == 2:
            problem = "lists of indices, not indices; for batches of your own, see docs/data.md, Batches of your own"
        elif order.ndim != 1 or not len(order) or order.dtype.kind not in "iu":
            problem = f"an array of shape {order.shape} and type {order.dtype}, not a list of indices"
        elif order.min() < 0 or order.max() >= size:
            problem = f"indices from {order.min()} to {order.max()}, but the dataset has {size} samples"
        elif epoch and len(order) != self.size:
            problem = f"{len(order)} samples, but {self.size} in the first; the length of an epoch must not change"
        if problem:
            raise UserError(f"loader.order: {self.name} returned, for epoch {epoch + 1}, {problem}")
        order = order.astype(np.int64, copy=False)
        if np.bincount(order).max() == 1:
            return order
        # occurrence[i]: how often the sample order[i] came before position i.
        by_index = np.argsort(order, kind="stable")
        grouped = order[by_index]
        occurrence = np.empty_like(order)
        occurrence[by_index] = np.arange(len(order)) - np.searchsorted(grouped, grouped)
        return order + size * occurrence


@ORDER_REGISTRY.register()
def shuffle(size: int, seed: int, epoch: int, dataset: Any) -> np.ndarray[Any, Any]:
    """Each sample once, in an order that is new in each epoch."""
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(size, generator=generator).numpy()


@ORDER_REGISTRY.register()
def sequential(size: int, seed: int, epoch: int, dataset: Any) -> np.ndarray[Any, Any]:
    """Each sample once, in the order of the dataset."""
    return np.arange(size)
