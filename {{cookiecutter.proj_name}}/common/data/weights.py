"""Data sets that hold weights of the task: what they read depends on when they read it."""

import gc
from collections import deque
from collections.abc import Collection, Iterable
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from common.base.errors import UserError
from common.base.text import label
from common.data.loader import BatchStream, EvaluationLoader
from common.data.view import innermost, kind_of

_MOST = 10_000  # objects that are looked at, of each attribute
_PLAIN = (str, bytes, int, float, type, ModuleType)


def refuse_stale_weights(sources: Iterable[BatchStream | EvaluationLoader], task: nn.Module) -> None:
    """Raise `UserError` if a data set holds weights of the task, but is not read with the latest ones."""
    weights = set(task.parameters())
    for data in sources:
        own = getattr(innermost(data.dataset), "__dict__", {}) | getattr(data.dataset, "__dict__", {})
        found = (name for name, value in own.items() if _reaches(value, weights))
        if data.lag and (attribute := next(found, None)) is not None:
            name = label(data.split, data.name) if isinstance(data, EvaluationLoader) else "train"
            what = f"{kind_of(data.dataset)}.{attribute}"
            raise UserError(f"dataset.{name}: {what} holds weights of the task, but {data.lag}")


def _reaches(value: Any, weights: Collection[nn.Parameter]) -> bool:
    """Whether an object, or what it refers to, is one of `weights`. Of a function, what it has taken from around it."""
    queue, seen = deque([value]), set[int]()
    while queue and len(seen) < _MOST:
        value = queue.popleft()
        if isinstance(value, nn.Parameter) and value in weights:
            return True
        if id(value) not in seen and not isinstance(value, _PLAIN):
            seen.add(id(value))
            queue += (value.__closure__ or ()) if isinstance(value, FunctionType) else gc.get_referents(value)
    return False
