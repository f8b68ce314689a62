"""What a dataset, its transforms and its collate function hold: random generators, and files that are open."""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import islice
from operator import getitem
from pathlib import PurePath
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from common.distributed.seed import mix

_OBJECTS, _ITEMS = 2_000, 1_000  # looked at, in all and of one list: the others are paths, labels or samples
_GENERATORS = 64  # seeded for each sample at most: of more, each belongs to a sample, and none is seeded
_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
# They are seeded for each sample anyway.
_GLOBAL = {id(getattr(random, "_inst")), id(getattr(np.random.mtrand, "_rand")), id(torch.default_generator)}  # noqa: B009
_PLAIN = (str, bytes, int, float, type(None), Tensor, np.ndarray, np.generic, PurePath, type, ModuleType)
# Processes may share these: they are made for it, or only written.
_SHAREABLE = ("multiprocessing.*", "torch.multiprocessing.*", "logging.*", "loguru.*", "threading.*", "_thread.*")
# Without a `fileno`.
_OPEN = (
    "sqlite3.Connection", "*.[Cc]onnection", "h5py.*.File", "h5py.*.Group", "h5py.*.Dataset", "*lmdb*Environment",
    "*lmdb*Transaction", "netCDF4.*Dataset", "rasterio.*DatasetReader", "cv2.VideoCapture", "decord.*VideoReader",
    "av.container.*", "pyarrow.*NativeFile", "pyarrow.*OSFile", "*.HDFStore",
)  # fmt: skip
# Where functions hold objects.
_HELD: dict[type, tuple[str, ...]] = {
    FunctionType: ("__closure__", "__defaults__", "__kwdefaults__"),
    CellType: ("cell_contents",),
    MethodType: ("__self__", "__func__"),
    BuiltinMethodType: ("__self__",),
    partial: ("func", "args", "keywords"),
}

Read = Callable[[], Any]  # returns what is held, also if it was replaced


class OwnGenerators:
    """The generators that objects hold, which code seeds once or not at all: each can be seeded for every sample.

    An object that saves and loads a state of its own (`state_dict`) keeps its generators.
    """

    def __init__(self, *owners: Any) -> None:
        self.names: list[str] = []
        self._found: list[tuple[Read, int]] = []
        for name, read, value in contents(*owners, with_state=False):
            if isinstance(value, _KINDS) and id(value) not in _GLOBAL:
                self._found.append((read, mix(crc32(name.encode()), self.names.count(name))))
                self.names.append(name)
        if len(self._found) > _GENERATORS:
            self._found = []

    def seed(self, seed: int) -> None:
        """Seed each, with another number: two transforms with generators of their own must not draw the same."""
        for read, key in self._found:
            with suppress(TypeError, ValueError):  # a kind that cannot be seeded
                _seed(read(), mix(seed, key))


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)


def open_handle(*owners: Any) -> str:
    """Return the name of an open file, archive or connection that objects hold, and its type; "" if there is none."""
    for name, _, value in contents(*owners):
        if _is_open(value):
            return f"{name} ({type(value).__name__})"
    return ""


def _is_open(value: Any) -> bool:
    kind: Any = type(value)
    if _matches(kind, _OPEN):
        return not kind.__module__.startswith("h5py") or bool(value)  # those of h5py are false when closed
    with suppress(Exception):  # it is closed, or no file
        readable = getattr(value, "readable", True)
        can_read = readable() if callable(readable) else readable
        return callable(getattr(type(value), "fileno", None)) and value.fileno() >= 0 and bool(can_read)
    return False


def contents(*owners: Any, with_state: bool = True) -> Iterator[tuple[str, Read, Any]]:
    """Yield what objects hold, in attributes, lists, dictionaries, closures and modules: name, how to read it, itself.

    The nearest come first. Without `with_state`, objects that save a state of their own are not looked into.
    """
    seen: dict[int, Any] = {}  # kept, so that no other object gets the same id meanwhile
    queue: deque[tuple[str, Read]] = deque((type(owner).__name__, partial(_itself, owner)) for owner in owners)
    while queue and len(seen) < _OBJECTS:
        name, read = queue.popleft()
        value: Any = None
        with suppress(ValueError):  # of a closure: not yet filled
            value = read()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value
        yield name, read, value
        kind: Any = type(value)
        if isinstance(value, _KINDS) or _matches(kind, _SHAREABLE):
            continue
        if with_state or not _has_state(value):
            queue.extend(_parts(name, value))
            for place in (*kind.__mro__, sys.modules.get(getattr(value, "__module__", ""))):
                if id(place) not in seen:
                    seen[id(place)] = place
                    queue.extend(_generators(place))


def _parts(name: str, value: Any) -> Iterator[tuple[str, Read]]:
    """Yield the names of all that an object holds, and functions that return it. No code of its class is called."""
    if isinstance(value, (list, tuple, deque)):
        for number, item in enumerate(islice(value, _ITEMS)):
            if not isinstance(item, _PLAIN):
                yield f"{name}[{number}]", partial(getitem, value, number)
        return
    if isinstance(value, dict):
        for key in islice(list(value), _ITEMS):
            yield f"{name}[{key!r}]", partial(value.get, key)
        return
    attributes = getattr(value, "__dict__", {})
    for key in list(attributes):
        yield f"{type(value).__name__}.{key}", partial(attributes.get, key)
    for base in type(value).__mro__:
        for key in _HELD.get(base, getattr(base, "__slots__", ())):
            owner = getattr(value, "__qualname__", name) if base in _HELD else type(value).__name__
            yield f"{owner}.{key}", partial(getattr, value, key, None)


def _generators(place: Any) -> Iterator[tuple[str, Read]]:
    """Yield the generators among the attributes of a class or a module."""
    values = getattr(place, "__dict__", {})
    for key, value in list(values.items()):
        if isinstance(value, _KINDS):
            yield f"{place.__name__}.{key}", partial(values.get, key)


def _itself(value: Any) -> Any:
    return value


@cache
def _matches(kind: Any, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(f"{kind.__module__}.{kind.__qualname__}", pattern) for pattern in patterns)


def _has_state(value: Any) -> bool:
    """Return whether the class of an object has a state of its own. Modules save weights, no generators."""
    return not isinstance(value, nn.Module) and callable(getattr(type(value), "load_state_dict", None))
