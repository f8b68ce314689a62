"""Applying a function to everything inside nested values."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def map_tensors(batch: Any, function: Callable[[Tensor], Any], method: str = "", *arguments: Any) -> Any:
    """Apply `function` to every tensor in mappings, lists, tuples, named tuples, dataclasses and objects with `to`.

    These are copied, with whatever else they hold; the rest is unchanged. Any object but a tensor that has `method` is
    replaced by what `method(*arguments)` returns.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if method and callable(convert := getattr(batch, method, None)):
        return convert(*arguments)
    if isinstance(batch, (list, tuple)):
        values = [map_tensors(value, function, method, *arguments) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(value, function, method, *arguments) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return items
        copied: Any = copy.copy(batch)  # keeps attributes of a subclass
        for key, value in items.items():  # not `update`, which some classes refuse
            copied[key] = value
        return copied
    if isinstance(batch, type) or not (dataclasses.is_dataclass(batch) or hasattr(batch, "to")):
        return batch
    fields = dataclasses.fields(batch) if dataclasses.is_dataclass(batch) else ()
    copied = copy.copy(batch)  # not `dataclasses.replace`, which leaves out fields that `__init__` does not take
    for name in [field.name for field in fields] or list(getattr(batch, "__dict__", {})):
        if hasattr(batch, name):
            object.__setattr__(copied, name, map_tensors(getattr(batch, name), function, method, *arguments))
    return copied


def map_leaves(value: Any, function: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """`value`, of nested dicts, lists and tuples, with every leaf and key replaced by `function(leaf, path)`.

    `path` holds the keys and indices of the leaf. Subclasses (OrderedDict, named tuples) become plain types.
    """
    if isinstance(value, Mapping):
        items = ((key, item, (*path, key)) for key, item in value.items())
        return {function(key, below): map_leaves(item, function, below) for key, item, below in items}
    if isinstance(value, (list, tuple)):
        mapped = [map_leaves(item, function, (*path, index)) for index, item in enumerate(value)]
        return tuple(mapped) if isinstance(value, tuple) else mapped
    return function(value, path)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested config as one dict with dotted keys: `{"optim.lr": 0.001}`. Lists stay as they are."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return leaves
