"""A dataset around another one: some of its samples."""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset


class View:
    """A dataset around another one, `whole`: all samples, or the first `limit`.

    It is indexed or read in order, as the inner one is; a subclass that changes samples does it in `__getitem__`, and
    in `__iter__` if it is read in order. Attributes that it does not define are those of the inner one.
    """

    def __init__(self, whole: Any, limit: int = sys.maxsize) -> None:
        self.whole = whole
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "whole":  # unpickling looks up attributes before any are set
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return min(self._limit, len(self.whole))

    def __getitem__(self, index: int) -> Any:
        return self.whole[index]

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.whole), self._limit)


def innermost(dataset: Any) -> Any:
    """Return the dataset inside of all views."""
    while isinstance(dataset, View):
        dataset = dataset.whole
    return dataset


def kind_of(dataset: Any) -> str:
    """Return the name of a dataset's class, or of the one inside of its views."""
    return type(innermost(dataset)).__name__


def is_map_style(dataset: Any) -> bool:
    """Return whether samples can be indexed, not only read one after the other."""
    inner = innermost(dataset)
    # PyTorch's own class for iterables has a `__getitem__`, which only raises an error.
    return hasattr(inner, "__len__") and hasattr(inner, "__getitem__") and not isinstance(inner, IterableDataset)
