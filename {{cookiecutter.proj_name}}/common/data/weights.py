"""Data sets that hold weights of the task: what they read depends on when they read it."""

from collections.abc import Iterable

from torch import nn

from common.base.errors import UserError
from common.base.text import label
from common.data.loader import BatchStream, EvaluationLoader
from common.data.view import innermost, kind_of


def refuse_stale_weights(sources: Iterable[BatchStream | EvaluationLoader], task: nn.Module) -> None:
    """Raise `UserError` if an attribute of a data set has weights of the task, but is not read with the latest ones."""
    weights = set(task.parameters())
    for data in sources:
        attributes = getattr(innermost(data.dataset), "__dict__", {}) | getattr(data.dataset, "__dict__", {})
        for attribute, value in attributes.items() if data.lag else ():
            held = value.parameters() if isinstance(value, nn.Module) else [value]
            if any(isinstance(each, nn.Parameter) and each in weights for each in held):
                name = label(data.split, data.name) if isinstance(data, EvaluationLoader) else "train"
                what = f"{kind_of(data.dataset)}.{attribute}"
                raise UserError(f"dataset.{name}: {what} holds weights of the task, but {data.lag}")
