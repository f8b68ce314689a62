"""Datasets that hold weights of the task: what they read depends on when they read it."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from types import MethodType
from typing import Any

from torch import nn

from common.base.errors import UserError
from common.base.text import label
from common.data.loader import BatchStream, EvaluationLoader
from common.data.view import innermost, kind_of

_MOST = 1_000  # items of a list that are looked at: the other ones are paths, labels or samples


def refuse_stale_weights(sources: Iterable[BatchStream | EvaluationLoader], task: nn.Module) -> None:
    """Raise `UserError` if an attribute of a dataset has weights of the task, but is not read with the latest ones."""
    weights = set(map(id, task.parameters()))
    for data in sources:
        attributes = getattr(innermost(data.dataset), "__dict__", {}) | getattr(data.dataset, "__dict__", {})
        for attribute, value in attributes.items() if data.lag else ():
            if not weights.isdisjoint(map(id, _contents(value))):
                name = label(data.split, data.name) if isinstance(data, EvaluationLoader) else "train"
                what = f"{kind_of(data.dataset)}.{attribute}"
                raise UserError(f"dataset.{name}: {what} holds weights of the task, but {data.lag}")


def _contents(value: Any) -> Iterator[Any]:
    """Yield a value, or the items of a list, dictionary or partial; of modules and of their methods, the weights."""
    if isinstance(value, partial):
        value = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, dict):
        value = list(value.values())
    for item in islice(value, _MOST) if isinstance(value, (list, tuple, set)) else [value]:
        owner = item.__self__ if isinstance(item, MethodType) else item
        yield from owner.parameters() if isinstance(owner, nn.Module) else [owner]
