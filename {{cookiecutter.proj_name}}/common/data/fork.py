"""What a forked worker cannot do: touch the GPU that its parent has begun to use."""

import multiprocessing
from collections.abc import Iterable, Mapping
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from common.base.errors import UserError

_DEEP, _MANY = 4, 100  # how far is looked: attributes of attributes, and the first entries of a list


def check_fork(dataset: Any, start_method: str | None, worker: int) -> None:
    """Refuse to fork workers for a data set that holds something on a GPU; they would fail at the first item.

    Workers come after the GPU is in use whenever training runs on one, and may then do all else. What only
    `__getitem__` brings to the GPU is not seen here; PyTorch refuses that itself.
    """
    if worker == 0 or (start_method or multiprocessing.get_start_method()) != "fork":
        return
    found = _on_gpu(dataset, _DEEP)
    if found is not None:
        raise UserError(
            f"{type(dataset).__name__}{found} lies on a GPU, where the {worker} worker(s) that are forked cannot use "
            "it; keep it on the CPU, or start them otherwise (--loader.start_method forkserver), or do without "
            "(--worker 0)"
        )


def _on_gpu(value: Any, depth: int) -> str | None:
    """The path to the first thing in `value` that lies on a GPU, as in ".images"; None when there is none."""
    if isinstance(value, Tensor):
        return "" if value.is_cuda else None
    if depth == 0 or isinstance(value, (type, ModuleType, FunctionType)):
        return None
    inside: Iterable[tuple[str, Any]]
    if isinstance(value, nn.Module):
        inside = [(".parameters()", each) for each in (*value.parameters(), *value.buffers())]
    elif isinstance(value, Mapping):
        inside = ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, (list, tuple)):
        inside = ((f"[{number}]", each) for number, each in enumerate(value))
    else:
        inside = ((f".{name}", each) for name, each in getattr(value, "__dict__", {}).items())
    for name, each in islice(inside, _MANY):
        if (rest := _on_gpu(each, depth - 1)) is not None:
            return name + rest
    return None
