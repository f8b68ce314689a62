"""What a dataset, its transforms and its collate function hold: random generators, and files that are open."""

import gc
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from common.distributed.seed import mix

_OBJECTS, _ITEMS = 10_000, 100  # most that are looked at, in all and in one list: the rest are samples
_GENERATORS = 64  # if there are more, each probably belongs to one sample, and none is seeded
_KINDS = (
    np.random.Generator,
    np.random.RandomState,
    random.Random,
    torch.Generator,
)
_GLOBAL = [vars(random)["_inst"], vars(np.random.mtrand)["_rand"], torch.default_generator]  # seeded anyway
_PLAIN = (
    str,
    bytes,
    int,
    float,
    type(None),
    Tensor,
    np.ndarray,
    np.generic,
    PurePath,
    type,
    ModuleType,
)
# Processes may share these: they are made for it, or only written.
_SHAREABLE = ("multiprocessing.*", "torch.multiprocessing.*", "logging.*", "loguru.*", "threading.*", "_thread.*")
# Without a `fileno`.
_OPEN = (
    "*.[Cc]onnection", "h5py.*", "*lmdb*Environment", "*lmdb*Transaction", "netCDF4.*Dataset",
    "rasterio.*DatasetReader", "cv2.VideoCapture", "decord.*VideoReader", "av.container.*", "pyarrow.*File",
    "*.HDFStore",
)  # fmt: skip


class OwnGenerators:
    """The generators that objects hold, which code seeds once or not at all: each can be seeded for every sample.

    An object that saves and loads a state of its own (`state_dict`) keeps its generators.
    """

    def __init__(self, *owners: Any) -> None:
        self.names: list[str] = []
        self._found: list[tuple[Any, int]] = []
        for name, value in contents(*owners, with_state=False):
            if isinstance(value, _KINDS) and value not in _GLOBAL:
                key = mix(crc32(name.encode()), self.names.count(name))
                self._found.append((value, key))
                self.names.append(name)
        if len(self._found) > _GENERATORS:
            self._found = []

    def seed(self, seed: int) -> None:
        """Seed each, with another number: two transforms with generators of their own must not draw the same."""
        for generator, key in self._found:
            with suppress(TypeError, ValueError):  # a kind that cannot be seeded
                _seed(generator, mix(seed, key))


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.manual_seed(seed)


def open_handle(*owners: Any) -> str:
    """Return the name of an open file, archive or connection that objects hold, and its type; "" if there is none."""
    for name, value in contents(*owners):
        if _is_open(value):
            return f"{name} ({type(value).__name__})"
    return ""


def _is_open(value: Any) -> bool:
    kind: Any = type(value)
    if _matches(kind, _OPEN):
        return not kind.__module__.startswith("h5py") or bool(value)  # those of h5py are false when closed
    if not callable(getattr(kind, "fileno", None)):
        return False
    try:
        can_read = getattr(value, "readable", True)
        if callable(can_read):
            can_read = can_read()
        return value.fileno() >= 0 and bool(can_read)
    except Exception:  # noqa: BLE001 - it is closed, or no file
        return False


def contents(
    *owners: Any,
    with_state: bool = True,
) -> Iterator[tuple[str, Any]]:
    """Yield what objects hold, in attributes, lists, dictionaries, closures and modules, with names.

    The nearest come first. Without `with_state`, objects that save a state of their own are not looked into.
    """
    seen: dict[int, Any] = {}  # kept, so that no other object gets the same id meanwhile
    queue = deque((type(owner).__name__, owner) for owner in owners)
    while queue and len(seen) < _OBJECTS:
        name, value = queue.popleft()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield name, value
        kind: Any = type(value)
        if isinstance(value, _KINDS) or _matches(kind, _SHAREABLE):
            continue
        if with_state or not _has_state(value):
            queue.extend(_inside(name, value))
            module = sys.modules.get(getattr(value, "__module__", ""))
            for place in (*kind.__mro__, module):
                if id(place) not in seen:
                    seen[id(place)] = place
                    queue.extend(_generators(place))


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with names. No code of its class is called."""
    if isinstance(value, (list, tuple, deque)):
        for number, item in enumerate(islice(value, _ITEMS)):
            yield f"{name}[{number}]", item
    elif isinstance(value, dict):
        for key, item in islice(list(value.items()), _ITEMS):
            yield f"{name}[{key!r}]", item
    elif isinstance(value, FunctionType):  # not its globals
        for item in (value.__closure__, value.__defaults__, value.__kwdefaults__):
            yield value.__qualname__, item
    else:
        kind = type(value).__name__
        attributes = getattr(value, "__dict__", {})
        for key in list(attributes):
            yield f"{kind}.{key}", attributes[key]
        for item in gc.get_referents(value):  # of slots, closures, bound methods, partial functions
            if item is not attributes:
                yield kind, item


def _generators(place: Any) -> Iterator[tuple[str, Any]]:
    """Yield the generators among the attributes of a class or a module."""
    for key, value in list(getattr(place, "__dict__", {}).items()):
        if isinstance(value, _KINDS):
            yield f"{place.__name__}.{key}", value


@cache
def _matches(kind: Any, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(f"{kind.__module__}.{kind.__qualname__}", pattern) for pattern in patterns)


def _has_state(value: Any) -> bool:
    """Return whether the class of an object has a state of its own. Modules save weights, no generators."""
    return not isinstance(value, nn.Module) and callable(getattr(type(value), "load_state_dict", None))
