"""Orders of an epoch that need weights or classes from the dataset.

Every file named `*_order.py` in this folder is imported, so that its functions are registered for `loader.order`.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt

from common.base.errors import UserError
from common.config.registry import ORDER_REGISTRY
from common.data.view import kind_of


@ORDER_REGISTRY.register()
def weighted(size: int, seed: int, epoch: int, dataset: Any, samples: PositiveInt | None = None) -> NDArray[Any]:
    """Draw samples with replacement, with probabilities in proportion to the dataset's `weights`.

    `samples`: number of samples per epoch; by default that of the dataset.
    """
    weights = _of_each_sample(dataset, "weighted", "weights").astype(np.float64)
    sums = np.cumsum(weights)
    if not np.isfinite(weights).all() or weights.min() < 0 or sums[-1] <= 0:
        raise UserError("loader.order: weights must be finite and not negative, and their sum greater than 0")
    drawn = torch.rand(samples or size, dtype=torch.float64).numpy() * sums[-1]
    return np.searchsorted(sums, np.minimum(drawn, np.nextafter(sums[-1], 0)), side="right")


@ORDER_REGISTRY.register()
def balanced(size: int, seed: int, epoch: int, dataset: Any, samples: PositiveInt | None = None) -> NDArray[Any]:
    """Use all classes equally often: a part of a large class, and the samples of a small class several times.

    The dataset gives the class of each sample as `targets` or `labels`. Numbers of samples per class, and of
    repetitions within a class, differ by one at most. `samples`: number of samples per epoch; by default that of
    the dataset.
    """
    classes, labels = np.unique(_of_each_sample(dataset, "balanced", "targets", "labels"), return_inverse=True)
    count, more = divmod(samples or size, len(classes))
    chosen = []
    for position, number in enumerate(torch.randperm(len(classes)).tolist()):
        members = np.flatnonzero(labels == number)
        mixed = members[torch.randperm(len(members)).numpy()]
        chosen.append(np.resize(mixed, count + int(position < more)))
    return np.concatenate(chosen)[torch.randperm(samples or size).numpy()]


def _of_each_sample(dataset: Any, order: str, *names: str) -> NDArray[Any]:
    """Return a value per sample, from the first of the attributes or methods `names` that the dataset has."""
    kind = kind_of(dataset)
    for name in names:
        value = getattr(dataset, name, None)
        if callable(value):
            value = value()
        if value is not None:
            values = np.asarray(value)
            expected = (len(getattr(dataset, "whole", dataset)),)
            if values.shape != expected:
                raise UserError(f"loader.order: {name} of {kind} has the shape {values.shape}, not {expected}")
            return values[: len(dataset)]
    raise UserError(f"loader.order: {order} needs an attribute or method {' or '.join(names)} of {kind}")
