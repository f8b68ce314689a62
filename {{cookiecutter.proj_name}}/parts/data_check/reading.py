"""Samples that are read before training, just as training reads them: twice, and again by a resume.

Whatever the bits of a sample depend on besides its number shows then: a generator without a seed, a counter, a cache
of augmented samples, stored data that are changed in place, files that were replaced.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, TypedDict

from loguru import logger
from torch.utils.data import default_collate

from common.config.problem import join_names
from common.data.held import OwnGenerators, open_handle
from common.data.keyed import KeyedBatches
from common.data.loader import BatchReader
from common.distributed.seed import mix
from parts.data_check.checksum import Sums, different, sums
from parts.data_check.process import in_other_process

SAMPLES = 64  # of each dataset that are read
_SECONDS = 1.0  # for each of the two processes; at least one sample of each dataset is read
_LONGEST = 5.0  # what a process may take
_BATCH = -1  # the number of a batch of some samples
_BATCH_SIZE = 8  # samples that a collate function of one's own gets
_STREAM = "a stream, whose records cannot be read twice"
_VARIES = (
    "reading {} of dataset.{} twice gives two values of {}: it depends on something besides its number, such as a "
    "generator that is not seeded, a counter, a cache of augmented samples, or stored data changed in place{}; "
    "resumed runs will differ. {}; see docs/data.md"
)


class Reading(TypedDict):
    """What was read of a dataset. A checkpoint keeps it.

    Attributes:
        size: samples that it has.
        samples: checksums of those read, by number.
        varies: the sample and the entry that were different when read again; "": none.
        unread: why none was read; "": some were.
    """

    size: int
    samples: dict[int, Sums]
    varies: str
    unread: str


def read_data(loaders: Mapping[str, Any]) -> dict[str, Reading]:
    """Read some samples of each dataset twice, by two processes, each with a dataset as it is now."""
    readings: dict[str, Reading] = {}
    batches: dict[str, KeyedBatches] = {}
    for name, loader in loaders.items():
        readings[name] = Reading(size=0, samples={}, varies="", unread=_unreadable(loader))
        if not readings[name]["unread"]:
            batches[name] = loader.batches
            example = loader._loader  # all start alike
    if not batches:
        return readings
    try:  # one after the other: they might write the same files
        first = in_other_process(example, _LONGEST, _read, batches, None)
        second = in_other_process(example, _LONGEST, _read, batches, first)
    except Exception as error:  # noqa: BLE001 - whatever a dataset raises, training reports where it reads
        for name in batches:
            readings[name]["unread"] = f"its samples could not be read before training ({error})"
        return readings
    for name, part in batches.items():
        readings[name]["size"] = part.size
        _join(name, readings[name], part, first[name], second[name])
    return readings


def _unreadable(loader: BatchReader) -> str:
    """Return why samples of a dataset cannot be read by another process."""
    if not loader.is_indexed:
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
    first: Mapping[str, Mapping[int, Sums]] | None,
) -> dict[str, dict[int, Sums]]:
    """Read samples of each dataset, as in the first epoch.

    The second process reads what the `first` did, backwards, and before that in a later epoch; evaluation is always in
    the first epoch. Training data with a state, which a checkpoint holds, are put back to where they were instead.
    """
    found = {}
    seconds = _SECONDS / len(batches) / 2
    for name, part in batches.items():
        dataset: Any = part.dataset
        numbers = chosen(part.size)
        is_training = name.startswith("train")
        if first is not None:  # it may not have had time for all
            numbers = [number for number in numbers if number in first[name]]
        if first is not None and is_training and callable(getattr(dataset, "load_state_dict", None)):
            state = deepcopy(dataset.state_dict())
            _pass(part, 1, numbers, seconds)
            dataset.load_state_dict(state)
        elif first is not None:
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
            found[number] = sums(batches.items(epoch, [number])[0])
            if time.monotonic() > until:
                return found
        if batches.collate is not default_collate:
            some = sorted(numbers)[:_BATCH_SIZE]
            found[_BATCH] = sums(batches.__getitems__((epoch, some)))
    return found


def _join(
    data: str,
    reading: Reading,
    batches: KeyedBatches,
    first: Mapping[int, Sums],
    second: Mapping[int, Sums],
) -> None:
    """Compare what two processes read, keep what both did, and name the first sample that was different."""
    for number, values in first.items():
        if number not in second:
            continue
        if values != second[number] and not reading["varies"]:
            name = f"sample {number}"
            if number == _BATCH:
                name = "a batch"
            entries = different(values, second[number])
            reading["varies"] = f"{name}: {entries}"
            generators = ""
            held = OwnGenerators(batches.dataset, batches.collate).names
            if held:
                generators = f" (generators found: {join_names(held, 5)})"
            advice = "Draw from the global generators, seeded for each sample, or keep the transform in the dataset"
            if not batches.random:
                advice = "With random = False nothing is seeded: remove that if samples draw random numbers"
            logger.warning(_VARIES, name, data, entries, generators, advice)
        if number != _BATCH:
            reading["samples"][number] = values
    if not reading["samples"]:
        reading["unread"] = "no sample could be read before training"
