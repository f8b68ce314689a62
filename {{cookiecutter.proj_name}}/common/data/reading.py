"""Samples that are read before training, just as training reads them: twice, and again by a resume.

Whatever the bits of a sample depend on besides its number shows then: a generator without a seed, a counter, a cache
of augmented samples, stored data that are changed in place, files that were replaced.
"""

import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
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
from common.data.workers import in_other_process
from common.distributed.seed import mix

SAMPLES = 64  # of each dataset that are read
_SECONDS = 1.0  # for each of the two processes; at least one sample of each dataset is read
_LONGEST = 5.0  # what a process may take
_BATCH = -1  # the number of a batch of some samples
_BATCH_SIZE = 8  # samples that a collate function of one's own gets
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
    """

    size: int = 0
    samples: dict[int, Sums] = field(default_factory=dict)
    varies: str = ""
    unread: str = ""

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it, as plain values."""
        return asdict(self)


def read_data(loaders: Mapping[str, Any]) -> dict[str, Reading]:
    """Read some samples of each dataset twice, by two processes, each with a dataset as it is now."""
    readings: dict[str, Reading] = {}
    batches: dict[str, KeyedBatches] = {}
    for name, loader in loaders.items():
        readings[name] = Reading(unread=_unreadable(loader))
        if not readings[name].unread:
            batches[name] = loader.batches
            example = loader._loader  # all start alike
    if not batches:
        return readings
    try:  # one after the other: they might write the same files
        first = in_other_process(example, _LONGEST, _read, batches, False)
        second = in_other_process(example, _LONGEST, _read, batches, True)
    except Exception as error:  # noqa: BLE001 - whatever a dataset raises, training reports where it reads
        for name in batches:
            readings[name].unread = f"its samples could not be read before training ({error})"
        return readings
    for name, part in batches.items():
        readings[name].size = part.size
        _join(readings[name], first[name], second[name])
        if readings[name].varies:
            _warn(name, readings[name].varies, part)
    return readings


def _unreadable(loader: Any) -> str:
    """Return why samples of a dataset cannot be read by another process."""
    if not isinstance(loader, (TrainStream, EvaluationLoader)):
        return _STREAM
    held = open_handle(loader.batches)
    if held:
        return f"{held} is open, and another process would move its position; open it on first use, in __getitem__"
    return ""


def chosen(size: int) -> list[int]:
    """Choose up to `SAMPLES` numbers below `size`, one of each part of the dataset, in an order that mixes them."""
    count = min(SAMPLES, size)
    numbers = []
    for part in range(count):
        first = size * part // count
        end = size * (part + 1) // count
        numbers.append(first + mix(first) % (end - first))
    return sorted(numbers, key=mix)


def _read(
    batches: Mapping[str, KeyedBatches],
    is_second: bool,
) -> dict[str, dict[int, Sums]]:
    """Read samples of each dataset, as in the first epoch.

    The second process reads them backwards, and before that in a later epoch; evaluation is always in the first.
    Training data with a state, which a checkpoint holds, are put back to where they were instead of read backwards.
    """
    found = {}
    seconds = _SECONDS / len(batches) / 2
    for name, part in batches.items():
        dataset: Any = part.dataset
        numbers = chosen(part.size)
        is_training = name.startswith("train")
        if is_second and is_training and callable(getattr(dataset, "load_state_dict", None)):
            state = deepcopy(dataset.state_dict())
            _pass(part, 1, numbers, seconds)
            dataset.load_state_dict(state)
        elif is_second:
            numbers.reverse()
            _pass(part, int(is_training), numbers, seconds)
        found[name] = _pass(part, 0, numbers, seconds)
    return found


def _pass(
    batches: KeyedBatches,
    epoch: int,
    numbers: Sequence[int],
    seconds: float,
) -> dict[int, Sums]:
    """Read samples until it is time, and a batch of some if a function of one's own makes it."""
    until = time.monotonic() + seconds
    found: dict[int, Sums] = {}
    with suppress(Exception):  # training reports it where it reads the sample
        for number in numbers:
            found[number] = _sums(batches.items(epoch, [number])[0])
            if time.monotonic() > until:
                return found
        if batches.collate is not default_collate:
            some = sorted(numbers)[:_BATCH_SIZE]
            found[_BATCH] = _sums(batches.__getitems__((epoch, some)))
    return found


def _join(
    reading: Reading,
    first: Mapping[int, Sums],
    second: Mapping[int, Sums],
) -> None:
    """Compare what two processes read, and keep what both did."""
    for number, sums in first.items():
        if number not in second:
            continue
        if sums != second[number] and not reading.varies:
            name = f"sample {number}"
            if number == _BATCH:
                name = "a batch"
            reading.varies = f"{name}: {_different(sums, second[number])}"
        if number != _BATCH:
            reading.samples[number] = sums
    if not reading.samples:
        reading.unread = "no sample could be read before training"


def _warn(name: str, varies: str, batches: KeyedBatches) -> None:
    """Name the sample that was different when it was read again."""
    sample, _, entries = varies.partition(": ")
    held = OwnGenerators(batches.dataset, batches.collate).names
    generators = ""
    if held:
        generators = f" (generators found: {join_names(held, 5)})"
    logger.warning(_VARIES, sample, name, entries, generators)


def compare_data(
    name: str,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
) -> tuple[str, str, int]:
    """Compare the records of two readings.

    Returns:
        `other` (samples or values), `varies` (two runs differ though the data are the same), `missing` (not compared)
        or `same`; the reason in words; and how many samples are the same.
    """
    data = f"dataset.{name}"
    both = [number for number in old["samples"] if number in new["samples"]]
    differing = [number for number in both if old["samples"][number] != new["samples"][number]]
    varies = new["varies"] or old["varies"]
    unread = new["unread"] or old["unread"]
    if old["size"] and new["size"] and old["size"] != new["size"]:
        return "other", f"{data}: {old['size']:,} samples -> {new['size']:,}", 0
    if differing and not varies:
        number = differing[0]
        entries = _different(old["samples"][number], new["samples"][number])
        more = f"{len(differing)} of {len(both)} samples read again differ"
        return "other", f"sample {number} of {data}: {entries} differs ({more})", 0
    if unread:
        return "missing", f"{data}: {unread}", 0
    if varies:
        return "varies", f"{data}: reading twice gives two values, {varies}", 0
    return "same", "", len(both)


def _different(first: Sums, second: Sums) -> str:
    """Name the entries that differ."""
    names = []
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            names.append(f"`{name}`")
    return join_names(names, 3)


def _sums(sample: Any) -> Sums:
    """Return the checksums of a sample, or of a batch."""
    if isinstance(sample, Mapping):
        return {str(name): checksum(value) for name, value in sample.items()}
    if isinstance(sample, (list, tuple)):
        return {f"[{number}]": checksum(value) for number, value in enumerate(sample)}
    return {"the sample": checksum(sample)}


def checksum(value: Any) -> str:
    """Return a checksum of nested values: the same for equal ones, in any process and wherever a folder lies."""
    content = blake2b(digest_size=8)
    _add(content, value, ())
    return content.hexdigest()


def _add(
    content: Any,
    value: Any,
    above: tuple[int, ...],
) -> None:
    """Add a value to a checksum. It is inside of other objects, `above`."""
    if isinstance(value, Tensor):
        dense = value.detach().to_dense().cpu().resolve_conj().contiguous()
        content.update(f"{dense.dtype} {tuple(dense.shape)}".encode())
        content.update(dense.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        content.update(f"{value.dtype} {value.shape}".encode())
        content.update(value.tobytes())
    elif isinstance(value, (bytes, bytearray)):
        content.update(value)
    elif isinstance(value, (str, os.PathLike)):
        text = os.fsdecode(value)
        if os.path.isabs(text):
            text = os.path.basename(text)
        content.update(os.fsencode(text))
    else:
        parts = _parts(value)
        if not parts or id(value) in above or len(above) == _DEPTH:
            content.update(re.sub(r" at 0x\w+", "", repr(value)).encode())
            return
        content.update(type(value).__name__.encode())
        for part in parts:
            _add(content, part, (*above, id(value)))


def _parts(value: Any) -> list[Any]:
    """Return what an object consists of; empty if it has no parts."""
    if isinstance(value, Mapping):
        parts: list[Any] = []
        for item in value.items():
            parts += item
        return parts
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, np.ndarray) and value.ndim:  # of objects
        return value.tolist()
    if hasattr(type(value), "__array_interface__") or hasattr(type(value), "__array__"):  # a picture, a table
        return [np.asarray(value)]
    if isinstance(value, (list, tuple, range, deque)):
        return list(value)
    if getattr(value, "__dict__", None):
        return [vars(value)]
    return []
