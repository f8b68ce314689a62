"""Samples that are read before training, just as training reads them: twice, and again by a resume.

Whatever the bits of a sample depend on besides its number shows then: a generator without a seed, a counter, a cache
of augmented samples, stored data that are changed in place, files that were replaced.
"""

import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch import Tensor
from torch.utils.data import default_collate

from common.config.problem import join_names
from common.data.held import OwnGenerators, open_handle
from common.data.keyed import KeyedBatches
from common.data.loader import EvaluationLoader, TrainStream
from common.data.workers import OtherProcess, context_of
from common.distributed.seed import mix

SAMPLES = 64  # of each dataset that are read
_SECONDS = 1.0  # for each of the two processes; at least one sample of each dataset is read
_LONGEST = 5.0  # what a process may take
_BATCH = 8  # samples that a collate function of one's own gets
_DEPTH = 20  # of nested values
_STREAM = "a stream, whose records cannot be read twice"
_VARIES = (
    "reading {} of dataset.{} twice gives two values of {}: it depends on something besides its number, such as a "
    "generator that is not seeded, a counter, a cache of augmented samples, or stored data changed in place{}; "
    "resumed runs will differ. Draw from the global generators, which are seeded for each sample; see docs/data.md"
)

Sums = dict[str, str]  # checksums of a sample, by entry


@dataclass
class Seen:
    """A sample, or a batch of some: checksums, and what is checked before training.

    Attributes:
        low, high: range of the `image`.
    """

    sums: Sums
    low: float = math.inf
    high: float = -math.inf


Found = dict[tuple[int, int], list[Seen]]  # by epoch and number; number -1: the batch


@dataclass
class Reading:
    """What was read of a dataset.

    Attributes:
        size: samples that it has.
        seen: those read, by number.
        varies: the sample and the entry that were different when read again; "": none.
        unread: why none was read; "": some were.
    """

    size: int = 0
    seen: dict[int, Seen] = field(default_factory=dict)
    varies: str = ""
    unread: str = ""

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it, as plain values."""
        kept = {name: value for name, value in vars(self).items() if name != "seen"}
        return {**kept, "samples": {number: seen.sums for number, seen in self.seen.items()}}


def read_data(loaders: Mapping[str, Any]) -> dict[str, Reading]:
    """Read some samples of each dataset twice, by two processes, each with a dataset as it is now.

    The second one reads them in another order, after others, and in another epoch first.
    """
    readings = {name: Reading(unread=_unreadable(loader)) for name, loader in loaders.items()}
    indexed = {name: loaders[name] for name, reading in readings.items() if not reading.unread}
    if not indexed:
        return readings
    context = context_of(next(iter(indexed.values()))._loader)
    batches = {name: loader.batches for name, loader in indexed.items()}
    try:  # one after the other: they might write the same files
        first = OtherProcess(context, _read, batches, False).result(_LONGEST)
        second = OtherProcess(context, _read, batches, True).result(_LONGEST)
    except Exception as error:  # noqa: BLE001 - whatever a dataset raises, training reports where it reads
        for name in indexed:
            readings[name].unread = f"its samples could not be read before training ({error})"
        return readings
    for name, loader in indexed.items():
        readings[name].size = loader.batches.size
        _join(readings[name], first[name], second[name])
        if readings[name].varies:
            _warn(name, readings[name].varies, loader)
    return readings


def _unreadable(loader: Any) -> str:
    """Return why samples of a dataset cannot be read by another process."""
    if not isinstance(loader, (TrainStream, EvaluationLoader)):
        return _STREAM
    if held := open_handle(loader.batches):
        return f"{held} is open, and another process would move its position; open it on first use, in __getitem__"
    return ""


def chosen(size: int) -> list[int]:
    """Choose up to `SAMPLES` numbers below `size`, one of each part of the dataset, in an order that mixes them."""
    count = min(SAMPLES, size)
    ends = [size * number // count for number in range(count + 1)]
    numbers = [first + mix(first) % (end - first) for first, end in pairwise(ends)]
    return sorted(numbers, key=mix)


def _read(batches: Mapping[str, KeyedBatches], is_second: bool) -> dict[str, Found]:
    """Read each dataset, in the first epoch and in a later one. Evaluation is always in the first.

    The second process reads the later epoch first. Training data with a state, which a checkpoint holds, are then put
    back to where they were.
    """
    found = {}
    for name, part in batches.items():
        dataset: Any = part.dataset
        later = int(name.startswith("train"))
        read = partial(_pass, part, seconds=_SECONDS / len(batches) / 2)
        numbers, seen = chosen(part.size), Found()
        found[name] = seen
        if not is_second:
            read(seen, 0, numbers)
            read(seen, later, numbers)
        elif later and all(callable(getattr(dataset, method, None)) for method in ("state_dict", "load_state_dict")):
            state = deepcopy(dataset.state_dict())
            read({}, later, numbers)
            dataset.load_state_dict(state)
            part.epoch = None
            read(seen, 0, numbers)
        else:
            read(seen, 0, numbers[:1])
            read(seen, later, numbers)
            read(seen, 0, numbers[::-1])
    return found


def _pass(batches: KeyedBatches, found: Found, epoch: int, numbers: Sequence[int], seconds: float) -> None:
    """Read until it is time, and a batch if it is made by a function of one's own."""
    until = time.monotonic() + seconds
    parts = [[number] for number in numbers]
    if batches.collate is not default_collate and len(numbers) > 1:
        parts.append(sorted(numbers)[:_BATCH])
    for part in parts:
        if time.monotonic() > until:
            return
        with suppress(Exception):  # training reports it where it reads the sample
            is_batch = len(part) > 1
            value = batches.__getitems__((epoch, part)) if is_batch else batches.items(epoch, part)[0]
            found.setdefault((epoch, -1 if is_batch else part[0]), []).append(look(value))


def _join(reading: Reading, first: Found, second: Found) -> None:
    """Compare what two processes read, and keep what both did."""
    for key, seen in first.items():
        epoch, number = key
        for value in seen + second.get(key, []):
            if value.sums != seen[0].sums and not reading.varies:
                name = f"sample {number}" if number >= 0 else "a batch"
                reading.varies = f"{name}: {_different(seen[0].sums, value.sums)}"
        if epoch == 0 and number >= 0 and key in second:
            reading.seen[number] = seen[0]
    if not reading.seen:
        reading.unread = "no sample could be read before training"


def _warn(name: str, varies: str, loader: Any) -> None:
    """Name the sample that was different when it was read again."""
    sample, _, entries = varies.partition(": ")
    held = OwnGenerators(loader.dataset, loader.batches.collate).names
    logger.warning(_VARIES, sample, name, entries, f" (generators found: {join_names(held, 5)})" if held else "")


def compare_data(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str, int]:
    """Compare the records of two readings.

    Returns:
        `other` (samples or values), `varies` (two runs differ though the data are the same), `missing` (not compared)
        or `same`; the reason in words; and how many samples are the same.
    """
    if "samples" not in old:
        return "missing", f"dataset.{name} (the checkpoint has no checksums of its samples)", 0
    both = [number for number in old["samples"] if number in new["samples"]]
    differing = [number for number in both if old["samples"][number] != new["samples"][number]]
    varies, unread = new["varies"] or old["varies"], new["unread"] or old["unread"]
    others = []
    if old["size"] != new["size"] and old["size"] and new["size"]:
        others.append(f"dataset.{name}: {old['size']:,} samples -> {new['size']:,}")
    if differing and not varies:
        entries = _different(old["samples"][differing[0]], new["samples"][differing[0]])
        more = f"({len(differing)} of {len(both)} samples read again differ)"
        others.append(f"sample {differing[0]} of dataset.{name}: {entries} differs {more}")
    if others:
        return "other", ", ".join(others), 0
    if unread:
        return "missing", f"dataset.{name}: {unread}", 0
    if varies:
        return "varies", f"dataset.{name}: reading twice gives two values, {varies}", 0
    return "same", "", len(both)


def _different(first: Sums, second: Sums) -> str:
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return join_names([f"`{name}`" for name in names], 3)


def look(sample: Any) -> Seen:
    """Return what is kept of a sample, or of a batch."""
    entries = sample if isinstance(sample, Mapping) else {}
    if isinstance(sample, (list, tuple)):
        entries = {f"[{number}]": value for number, value in enumerate(sample)}
    seen = Seen({str(name): checksum(value) for name, value in entries.items()} or {"the sample": checksum(sample)})
    seen.low, seen.high = image_range(sample)
    return seen


def image_range(sample: Any) -> tuple[float, float]:
    """Return the least and the greatest value of `image` in a sample or a batch; of none, inf and -inf."""
    image = sample.get("image") if isinstance(sample, Mapping) else None
    if isinstance(image, Tensor) and image.is_floating_point() and image.ndim in (3, 4) and image.numel():
        low, high = torch.stack(image.aminmax()).tolist()
        return low, high
    return math.inf, -math.inf


def checksum(value: Any) -> str:
    """Return a checksum of nested values: the same for equal ones, in any process and wherever a folder lies."""
    content = blake2b(digest_size=8)
    for part in _bytes(value, ()):
        content.update(part)
    return content.hexdigest()


def _bytes(value: Any, above: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the content of a value that is inside of others, `above`, piece by piece."""
    if isinstance(value, Tensor):
        dense = value.detach().to_dense().cpu().resolve_conj().contiguous()
        yield f"{dense.dtype} {tuple(dense.shape)}".encode()
        yield dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, (bytes, bytearray)):
        yield bytes(value)
    elif isinstance(value, (str, os.PathLike)):
        text = os.fsdecode(value)
        yield os.fsencode(os.path.basename(text) if os.path.isabs(text) else text)
    elif len(above) == _DEPTH or id(value) in above or not (parts := _parts(value)):
        yield re.sub(r" at 0x\w+", "", repr(value)).encode()
    else:
        yield type(value).__name__.encode()
        for part in parts:
            yield from _bytes(part, (*above, id(value)))


def _parts(value: Any) -> list[Any]:
    """Return what an object consists of; empty if it has no parts."""
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, np.ndarray):  # of objects
        return value.tolist() if value.ndim else []
    if hasattr(type(value), "__array_interface__") or hasattr(type(value), "__array__"):  # a picture, a table
        return [np.asarray(value)]
    if isinstance(value, (list, tuple, range, deque)):
        return list(value)
    return [vars(value)] if getattr(value, "__dict__", None) else []
