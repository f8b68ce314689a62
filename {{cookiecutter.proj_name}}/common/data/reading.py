"""Samples that are read before training, just as training reads them: twice, and again by a resume.

Whatever the bits of a sample depend on besides its number shows then: a generator that nobody seeds, a counter, a cache
of augmented samples, stored data that are changed in place, files that were replaced.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from common.config.names import join_names
from common.data.held import OwnGenerators, open_handle
from common.data.keyed import KeyedBatches
from common.data.loader import EvaluationLoader, TrainStream
from common.data.view import innermost, is_map_style, kind_of
from common.data.workers import OtherProcess, context_of
from common.distributed.seed import mix

SAMPLES = 64  # of each dataset that are read
_SECONDS = 2.0  # for all datasets; at least one sample of each is read
_LONGEST = 30.0
_BATCH = 8  # samples that a collate function of one's own gets
_DEPTH = 20
_STREAM = "a stream, whose records cannot be read twice"
_VARIES = (
    "reading {} of dataset.{} twice gives two values of {}: it depends on something besides its number, such as a "
    "generator that is not seeded, a counter, a cache of augmented samples, or stored data that are changed in place{}. "
    "Resumed runs will differ. Draw from the global generators, which are seeded for each sample; see docs/data.md"
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
    low: float = 0.0
    high: float = 0.0

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        kept = ("size", "samples", "varies", "unread", "digest")
        return {name: value for name, value in asdict(self).items() if name in kept}


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
    context = context_of(next(iter(indexed.values())).loader)
    batches = {name: loader.batches for name, loader in indexed.items()}
    readers = [OtherProcess(context, _read, batches, is_second) for is_second in (False, True)]
    try:
        first, second = (reader.result(_LONGEST) for reader in readers)
    except Exception as error:  # noqa: BLE001 - a dataset can raise anything, and training reports it where it reads
        for name in indexed:
            readings[name].unread = f"samples could not be read by another process ({type(error).__name__}: {error})"
        return readings
    finally:
        for reader in readers:
            reader.end()
    for name, loader in indexed.items():
        _join(readings[name], loader.batches, first[name], second[name])
    return readings


def _unreadable(loader: Any) -> str:
    """Return why samples of a dataset cannot be read by another process."""
    if not isinstance(loader, (TrainStream, EvaluationLoader)):
        return _STREAM
    if held := open_handle(loader.batches):
        return f"{held} is open, and another process would move its position; open it on first use, in __getitem__"
    return ""


def _digest(dataset: Any) -> str:
    inner = innermost(dataset)
    # Looked up in the class: a dataset around another one passes on the methods of the inner one.
    return _checksum(inner.digest()) if callable(getattr(type(inner), "digest", None)) else ""


def chosen(size: int) -> list[int]:
    """Choose up to `SAMPLES` numbers below `size`, one of each part of the dataset, in an order that mixes them."""
    count = min(SAMPLES, size)
    ends = [size * number // count for number in range(count + 1)]
    numbers = [first + mix(first) % (end - first) for first, end in zip(ends, ends[1:], strict=False)]
    return sorted(numbers, key=mix)


@dataclass
class _Seen:
    """A sample, or a batch of some: checksums, and what is checked before training."""

    sums: Sums
    label: int | None = None
    low: float = 0.0
    high: float = 0.0


Found = dict[tuple[int, int], list[_Seen]]  # by epoch and number; number -1: the batch


def _read(batches: Mapping[str, KeyedBatches], is_second: bool) -> dict[str, Found]:
    """Read each dataset in its share of the time."""
    found, start = {}, time.monotonic()
    for number, (name, part) in enumerate(batches.items()):
        share = _SECONDS / len(batches)
        reader = _Reader(part, start + share * (number + 0.5), start + share * (number + 1))
        found[name] = reader.read_other_way() if is_second else reader.read()
    return found


class _Reader:
    """Reads samples of a dataset: until `half`, then others until `end`, in seconds of the monotonic clock."""

    def __init__(self, batches: KeyedBatches, half: float, end: float) -> None:
        self.batches, self.half, self.end = batches, half, end
        self.numbers = chosen(batches.size)
        self.found: Found = {}

    def read(self) -> Found:
        """Read in an order, then again in the next epoch."""
        self._pass(0, self.numbers, self.half)
        self._pass(1, self.numbers, self.end)
        return self.found

    def read_other_way(self) -> Found:
        """Read the next epoch first. A dataset with a state of its own is then put back to where it was."""
        dataset = self.batches.dataset
        has_state = callable(getattr(dataset, "state_dict", None)) and callable(
            getattr(dataset, "load_state_dict", None)
        )
        if has_state:
            state = deepcopy(dataset.state_dict())
            self._pass(1, self.numbers, self.half)
            dataset.load_state_dict(state)
            self.found, self.batches.epoch = {}, None
            self._pass(0, self.numbers, self.end)
            return self.found
        self._pass(0, self.numbers[:1], self.half)
        self._pass(1, self.numbers, self.half)
        again = [number for epoch, number in self.found if epoch and number >= 0]
        self._pass(0, again[::-1], self.end)
        return self.found

    def _pass(self, epoch: int, numbers: Sequence[int], until: float) -> None:
        """Read until it is time; the first sample in any case, if there is none yet."""
        for number in numbers:
            if self.found and time.monotonic() > until:
                return
            self._note(epoch, number, lambda number=number: self.batches.items(epoch, [number])[0])  # type: ignore[misc]
        if self.batches.collate is not default_collate and len(numbers) > 1:
            some = sorted(self.numbers)[:_BATCH]
            self._note(epoch, -1, lambda: self.batches.__getitems__((epoch, some)))

    def _note(self, epoch: int, number: int, read: Any) -> None:
        try:
            value = read()
        except Exception:  # noqa: BLE001 - training reports it where it reads the sample
            return
        self.found.setdefault((epoch, number), []).append(_seen(value))


def _join(reading: Reading, batches: KeyedBatches, first: Found, second: Found) -> None:
    """Compare what two processes read, and keep what both did."""
    reading.size = batches.size
    for key, seen in first.items():
        epoch, number = key
        others = second.get(key, [])
        name = f"sample {number}" if number >= 0 else "a batch"
        for other in others:
            if other.sums != seen[0].sums and not reading.varies:
                entries = _different(seen[0].sums, other.sums)
                reading.varies = f"{name}: {entries}"
        if epoch == 0 and number >= 0 and others:
            reading.samples[number] = seen[0].sums
            reading.low, reading.high = min(reading.low, seen[0].low), max(reading.high, seen[0].high)
            if seen[0].label is not None:
                reading.labels[number] = seen[0].label
    if not reading.samples:
        reading.unread = "no sample could be read, or not in time"


def varying(name: str, reading: Reading, loader: Any) -> str:
    """Say which sample was different when it was read again, for a warning; "" if none was."""
    if not reading.varies:
        return ""
    sample, _, entries = reading.varies.partition(": ")
    held = OwnGenerators(loader.dataset, loader.batches.collate).names
    return _VARIES.format(sample, name, entries, f" (generators found: {join_names(held, 5)})" if held else "")


def compare_data(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return how a dataset differs from what an earlier start read of it, and how many samples were read again."""
    both = [number for number in old["samples"] if number in new["samples"]]
    differing = [number for number in both if old["samples"][number] != new["samples"][number]]
    said = []
    if old["size"] != new["size"]:
        said.append(f"dataset.{name}: {old['size']:,} samples -> {new['size']:,}")
    if differing:
        entries = _different(old["samples"][differing[0]], new["samples"][differing[0]])
        more = f" ({len(differing)} of {len(both)} samples read again differ)"
        said.append(f"sample {differing[0]} of dataset.{name}: {entries} differs{more}")
    if old["digest"] and new["digest"] and old["digest"] != new["digest"]:
        said.append(f"dataset.{name}: its digest() differs")
    return said, len(both)


def _different(first: Sums, second: Sums) -> str:
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return join_names([f"`{name}`" for name in names], 3)


def _seen(sample: Any) -> _Seen:
    """Return what is kept of a sample."""
    entries = sample if isinstance(sample, Mapping) else {}
    if isinstance(sample, (list, tuple)):
        entries = {f"[{number}]": value for number, value in enumerate(sample)}
    seen = _Seen({str(name): _checksum(value) for name, value in entries.items()} or {"the sample": _checksum(sample)})
    label, image = entries.get("label"), entries.get("image")
    if label is not None and np.size(label) == 1 and np.asarray(label).dtype.kind in "iu":
        seen.label = int(label)
    if isinstance(image, Tensor) and image.is_floating_point() and image.ndim in (3, 4) and image.numel():
        seen.low, seen.high = (value.item() for value in image.aminmax())
    return seen


def _checksum(value: Any) -> str:
    """Return a checksum of nested values: the same for equal ones, in any process and wherever a folder lies."""
    content = blake2b(digest_size=8)
    for part in _bytes(value, _DEPTH):
        content.update(part)
    return content.hexdigest()


def _bytes(value: Any, depth: int) -> Iterator[bytes]:
    """Yield the content of a value, piece by piece."""
    if isinstance(value, Tensor):
        dense = value.detach().to_dense().cpu().resolve_conj().contiguous()
        yield f"{dense.dtype} {tuple(dense.shape)}".encode()
        yield dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, (str, os.PathLike)):
        text = os.fspath(value)
        shown = os.path.basename(text) if os.path.isabs(text) else text
        yield shown if isinstance(shown, bytes) else shown.encode(errors="surrogateescape")
    elif isinstance(value, bytes):
        yield value
    elif isinstance(value, (np.ndarray, np.generic)) and not np.asarray(value).dtype.hasobject:
        yield f"{value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif depth == 0 or value is None or isinstance(value, (int, float, complex)):
        yield re.sub(r" at 0x\w+", "", repr(value)).encode()
    else:
        yield type(value).__name__.encode()
        for part in _parts(value):
            yield from _bytes(part, depth - 1)


def _parts(value: Any) -> Iterable[Any]:
    """Return what an object consists of."""
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if hasattr(type(value), "__array_interface__") or hasattr(type(value), "__array__"):  # a picture, a table
        return [np.asarray(value)]
    if isinstance(value, Iterable) and hasattr(type(value), "__len__"):
        return value
    return [vars(value)] if hasattr(value, "__dict__") else [repr(value)]
