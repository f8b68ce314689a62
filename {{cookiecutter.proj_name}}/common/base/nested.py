"""Applying a function to everything inside nested values."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def map_tensors(
    batch: Any,
    function: Callable[[Tensor], Any],
    method: str = "",
    *arguments: Any,
) -> Any:
    """Apply `function` to every tensor in mappings, lists, tuples, named tuples, dataclasses and objects with `to`.

    These are copied, with whatever else they hold; the rest is unchanged. Any object but a tensor that has `method` is
    replaced by what `method(*arguments)` returns.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if method:
        convert = getattr(batch, method, None)
        if callable(convert):
            return convert(*arguments)
    if isinstance(batch, (list, tuple)):
        values = [map_tensors(value, function, method, *arguments) for value in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*values)
        return type(batch)(values)
    if isinstance(batch, Mapping):
        copied: Any = {}
        if isinstance(batch, MutableMapping):
            copied = copy.copy(batch)  # keeps attributes of a subclass
        for key, value in batch.items():  # not `update`, which some classes refuse
            copied[key] = map_tensors(value, function, method, *arguments)
        return copied
    is_dataclass = dataclasses.is_dataclass(batch)
    if isinstance(batch, type) or not (is_dataclass or hasattr(batch, "to")):
        return batch
    names = list(getattr(batch, "__dict__", {}))
    if is_dataclass:
        names = [field.name for field in dataclasses.fields(batch)] or names
    copied = copy.copy(batch)  # not `dataclasses.replace`, which leaves out fields that `__init__` does not take
    for name in names:
        if hasattr(batch, name):
            value = map_tensors(getattr(batch, name), function, method, *arguments)
            object.__setattr__(copied, name, value)
    return copied


def map_leaves(
    value: Any,
    function: Callable[[Any, tuple[Any, ...]], Any],
    path: tuple[Any, ...] = (),
) -> Any:
    """`value`, of nested dicts, lists and tuples, with every leaf and key replaced by `function(leaf, path)`.

    `path` holds the keys and indices of the leaf. Subclasses (OrderedDict, named tuples) become plain types.
    """
    if isinstance(value, Mapping):
        mapped = {}
        for key, item in value.items():
            below = (*path, key)
            name = function(key, below)  # before what is below it
            mapped[name] = map_leaves(item, function, below)
        return mapped
    if isinstance(value, (list, tuple)):
        items = []
        for index, item in enumerate(value):
            items.append(map_leaves(item, function, (*path, index)))
        return tuple(items) if isinstance(value, tuple) else items
    return function(value, path)
