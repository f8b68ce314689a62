"""Why samples do not make a batch: which sample lacks what the others have."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from common.base.errors import UserError


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
