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
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch import Tensor
from torch.utils.data import default_collate

from common.config.names import join_names
from common.data.held import OwnGenerators, open_handle
from common.data.keyed import KeyedBatches
from common.data.loader import EvaluationLoader, TrainStream
from common.data.view import innermost, kind_of
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
class Reading:
    """What was read of a dataset.

    Attributes:
        size: samples that it has.
        samples: checksums of those read, by number.
        varies: the sample and the entry that were different when read again; "": none.
        unread: why none was read; "": some were.
        digest: a checksum of what the dataset's own `digest()` returns; "" without one.
        labels: of samples read, if each has one number as its `label`.
        low, high: range of their `image`.
    """

    size: int = 0
    samples: dict[int, Sums] = field(default_factory=dict)
    varies: str = ""
    unread: str = ""
    digest: str = ""
    labels: dict[int, int] = field(default_factory=dict)
    low: float = math.inf
    high: float = -math.inf


def read_data(loaders: Mapping[str, Any]) -> dict[str, Reading]:
    """Read some samples of each dataset twice, by two processes, each with a dataset as it is now.

    The second one reads them in another order, after others, and in another epoch first.
    """
    readings = {name: Reading(unread=_unreadable(loader)) for name, loader in loaders.items()}
    indexed = {name: loaders[name] for name, reading in readings.items() if not reading.unread}
    for name, loader in loaders.items():
        readings[name].digest = _digest(loader.dataset)
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
        _join(readings[name], loader.batches.size, first[name], second[name])
    return readings


def records(readings: Mapping[str, Reading]) -> dict[str, dict[str, Any]]:
    """Return what a checkpoint keeps of them, as plain values."""
    kept = ("size", "samples", "varies", "unread", "digest")
    return {data: {name: getattr(reading, name) for name in kept} for data, reading in readings.items()}


def _unreadable(loader: Any) -> str:
    """Return why samples of a dataset cannot be read by another process."""
    if not isinstance(loader, (TrainStream, EvaluationLoader)):
        return _STREAM
    if held := open_handle(loader.batches):
        return f"{held} is open, and another process would move its position; open it on first use, in __getitem__"
    return ""


def _digest(dataset: Any) -> str:
    inner = innermost(dataset)
    # Looked up in the class: a dataset around another one may pass on the methods of the inner one.
    if not callable(getattr(type(inner), "digest", None)):
        return ""
    try:
        return checksum(inner.digest())
    except Exception as error:  # noqa: BLE001 - training needs no digest
        logger.warning("{}.digest() failed, and is not compared: {!r}", kind_of(dataset), error)
        return ""


def chosen(size: int) -> list[int]:
    """Choose up to `SAMPLES` numbers below `size`, one of each part of the dataset, in an order that mixes them."""
    count = min(SAMPLES, size)
    ends = [size * number // count for number in range(count + 1)]
    numbers = [first + mix(first) % (end - first) for first, end in pairwise(ends)]
    return sorted(numbers, key=mix)


@dataclass
class Seen:
    """A sample, or a batch of some: checksums, and what is checked before training."""

    sums: Sums
    label: int | None = None
    low: float = math.inf
    high: float = -math.inf


Found = dict[tuple[int, int], list[Seen]]  # by epoch and number; number -1: the batch


def _read(batches: Mapping[str, KeyedBatches], is_second: bool) -> dict[str, Found]:
    """Read each dataset in its share of the time."""
    found, start, share = {}, time.monotonic(), _SECONDS / len(batches)
    for number, (name, part) in enumerate(batches.items()):
        reader = _Reader(part, is_train=name.startswith("train"))
        half, end = start + share * (number + 0.5), start + share * (number + 1)
        (reader.read_other_way if is_second else reader.read)(half, end)
        found[name] = reader.found
    return found


class _Reader:
    """Reads samples of a dataset, in the first epoch and in a later one. Evaluation is always in the first.

    A checkpoint holds the state of training data, if they have one.
    """

    def __init__(self, batches: KeyedBatches, *, is_train: bool) -> None:
        self.dataset: Any = batches.dataset
        methods = [getattr(self.dataset, name, None) for name in ("state_dict", "load_state_dict")]
        self.has_state = is_train and all(map(callable, methods))
        self.batches, self.later = batches, int(is_train)
        self.numbers = chosen(batches.size)
        self.found: Found = {}

    def read(self, half: float, end: float) -> None:
        """Read until `half`, of the monotonic clock, and until `end` in the later epoch."""
        self._pass(0, self.numbers, half)
        self._pass(self.later, self.numbers, end)

    def read_other_way(self, half: float, end: float) -> None:
        """Read the later epoch first. A dataset with a state of its own is then put back to where it was."""
        if self.has_state:
            state = deepcopy(self.dataset.state_dict())
            self._pass(self.later, self.numbers, half)
            self.dataset.load_state_dict(state)
            self.found, self.batches.epoch = {}, None
            self._pass(0, self.numbers, end)
            return
        self._pass(0, self.numbers[:1], half)
        self._pass(self.later, self.numbers, half)
        self._pass(0, self.numbers[::-1], end)

    def _pass(self, epoch: int, numbers: Sequence[int], until: float) -> None:
        """Read until it is time; the first sample in any case, if there is none yet."""
        for number in numbers:
            if self.found and time.monotonic() > until:
                return
            self._note(epoch, number, lambda number=number: self.batches.items(epoch, [number])[0])
        if self.batches.collate is not default_collate and len(numbers) > 1:
            some = sorted(self.numbers)[:_BATCH]
            self._note(epoch, -1, lambda: self.batches.__getitems__((epoch, some)))

    def _note(self, epoch: int, number: int, read: Any) -> None:
        try:
            value = read()
        except Exception:  # noqa: BLE001 - training reports it where it reads the sample
            return
        self.found.setdefault((epoch, number), []).append(look(value))


def _join(reading: Reading, size: int, first: Found, second: Found) -> None:
    """Compare what two processes read, and keep what both did."""
    reading.size = size
    for key, seen in first.items():
        epoch, number = key
        values = seen + second.get(key, [])
        for value in values:
            if value.sums != seen[0].sums and not reading.varies:
                name = f"sample {number}" if number >= 0 else "a batch"
                reading.varies = f"{name}: {_different(seen[0].sums, value.sums)}"
        if epoch == 0 and number >= 0 and key in second:
            reading.samples[number] = seen[0].sums
            reading.low, reading.high = min(reading.low, seen[0].low), max(reading.high, seen[0].high)
            if seen[0].label is not None:
                reading.labels[number] = seen[0].label
    if not reading.samples:
        reading.unread = "no sample could be read before training"


def varying(name: str, reading: Reading, loader: Any) -> str:
    """Say which sample was different when it was read again, for a warning; "" if none was."""
    if not reading.varies:
        return ""
    sample, _, entries = reading.varies.partition(": ")
    held = OwnGenerators(loader.dataset, loader.batches.collate).names
    return _VARIES.format(sample, name, entries, f" (generators found: {join_names(held, 5)})" if held else "")


@dataclass
class DataChange:
    """How a dataset differs from what an earlier start read of it, in words.

    Attributes:
        other: other samples, or other values.
        varies: why two runs differ though the data are the same.
        missing: what was not compared.
        same: samples read again that are the same, if all are.
    """

    other: list[str] = field(default_factory=list)
    varies: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    same: int = 0


def compare_data(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> DataChange:
    """Compare the records of two readings."""
    change = DataChange()
    if "samples" not in old:
        change.missing.append(f"dataset.{name} (the checkpoint has no checksums of its samples)")
        return change
    if old["size"] != new["size"] and old["size"] and new["size"]:
        change.other.append(f"dataset.{name}: {old['size']:,} samples -> {new['size']:,}")
    if old["digest"] and new["digest"] and old["digest"] != new["digest"]:
        change.other.append(f"dataset.{name}: its digest() differs")
    if unread := new["unread"] or old["unread"]:
        change.missing.append(f"dataset.{name}: {unread}")
        return change
    if varies := new["varies"] or old["varies"]:
        change.varies.append(f"dataset.{name}: reading twice gives two values, {varies}")
        return change
    both = [number for number in old["samples"] if number in new["samples"]]
    differing = [number for number in both if old["samples"][number] != new["samples"][number]]
    if differing:
        entries = _different(old["samples"][differing[0]], new["samples"][differing[0]])
        more = f"({len(differing)} of {len(both)} samples read again differ)"
        change.other.append(f"sample {differing[0]} of dataset.{name}: {entries} differs {more}")
    if not change.other:
        change.same = len(both)
    return change


def _different(first: Sums, second: Sums) -> str:
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return join_names([f"`{name}`" for name in names], 3)


def look(sample: Any) -> Seen:
    """Return what is kept of a sample, or of a batch."""
    entries = sample if isinstance(sample, Mapping) else {}
    if isinstance(sample, (list, tuple)):
        entries = {f"[{number}]": value for number, value in enumerate(sample)}
    seen = Seen({str(name): checksum(value) for name, value in entries.items()} or {"the sample": checksum(sample)})
    label = entries.get("label")
    if isinstance(label, (int, np.integer, np.ndarray, Tensor)):
        number = np.asarray(label)
        if number.size == 1 and number.dtype.kind in "iu":
            seen.label = int(number.item())
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
