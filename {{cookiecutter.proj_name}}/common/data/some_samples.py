"""A look at a few samples of a dataset before training."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from common.base.nested import map_tensors
from common.data.keyed import loop_streams_unchanged, seed_all
from common.data.loader import LoaderConfig, make_loader
from common.data.workers import read


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Up to `count` of the items, evenly spaced, the first and the last among them."""
    places = np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)
    return [items[index] for index in dict.fromkeys(places.tolist())]


def look_at(
    dataset: Any, indices: Sequence[int], function: Callable[[Any], Any], config: LoaderConfig, worker: int
) -> list[Any]:
    """Return the results of `function` for these samples, all read with the same random numbers.

    In a worker if there are any: workers would inherit a file that the dataset opens here, and its position.
    """
    samples = _Samples(dataset, function)
    if not worker:
        with loop_streams_unchanged():
            return [samples[index] for index in indices]
    return list(read(make_loader(samples, config, 1, 0, torch.device("cpu"), sampler=indices, batch_size=None)))


class _Samples:
    def __init__(self, dataset: Any, function: Callable[[Any], Any]) -> None:
        self.dataset, self.function = dataset, function

    def __getitem__(self, index: int) -> Any:
        seed_all(0)
        return self.function(self.dataset[index])


def digest(sample: Any) -> str:
    """Return a checksum of a sample: the same for equal values, however tensors in it lie in memory."""
    values = map_tensors(sample, lambda tensor: np.ascontiguousarray(tensor.detach()))
    return blake2b(pickle.dumps(values), digest_size=16).hexdigest()


def label_of(sample: Any) -> int | None:
    """Return the class of a sample: its `label`; None if it has none."""
    label = sample.get("label") if isinstance(sample, Mapping) else None
    return None if label is None or np.asarray(label).size != 1 else int(label)
