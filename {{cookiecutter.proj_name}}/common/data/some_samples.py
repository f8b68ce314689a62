"""A look at a few samples of a data set before training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from common.data.keyed import loop_streams_unchanged, seed_all
from common.data.loader import LoaderConfig, make_loader
from common.data.workers import read


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Up to `count` of the items, evenly spaced, the first and the last among them."""
    places = np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)
    return [items[place] for place in dict.fromkeys(places.tolist())]


def look_at(
    dataset: Any, indices: Sequence[int], function: Callable[[Any], Any], config: LoaderConfig, worker: int
) -> list[Any]:
    """What `function` returns for each of these samples, all read with the same random numbers.

    In a worker if there are any: workers would inherit a file that the data set opens here, and its position.
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
    """A digest of all values of a sample: tensors, arrays and plain values, nested in any way."""
    found = blake2b(digest_size=16)
    for part in _parts(sample):
        found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        array = np.ascontiguousarray(value)
        yield f"{array.dtype} {array.shape}".encode()
        yield array.tobytes()
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key).encode()
            yield from _parts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _parts(each)
    else:
        yield value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()


def label_of(sample: Any) -> int | None:
    """The class of a sample: its `label`; None if it has none."""
    label = sample.get("label") if isinstance(sample, Mapping) else None
    return None if label is None or np.asarray(label).size != 1 else int(label)
