"""Samples that two splits have in common: by what their datasets call them, or by their values."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations, islice
from typing import Any

import numpy as np
from loguru import logger

from common.data.held import open_handle
from common.data.keyed import seed_all
from common.data.reading import checksum
from common.data.view import innermost, is_map_style
from common.data.workers import OtherProcess, context_of

_SAMPLES = 8  # of a split that are compared at most
_LONGEST = 5.0  # seconds that reading these samples may take
_ADVICE = (
    "results on them do not show how the model performs on new data. Give each split samples of its own: another "
    "folder, or parts such as [0, 0.8] and [0.8, 1]"
)


def warn_of_shared_samples(loaders: Mapping[str, Any]) -> None:
    """Warn of splits that have samples in common.

    `sample_ids()` of a dataset gives one hashable value per sample, the same for the same sample in any split, such as
    the full path of a file. If a dataset has no `sample_ids`, a few of its samples are read and compared with the
    training data.

    Args:
        loaders: of the datasets, by `label`.
    """
    sets = {name: loader.dataset for name, loader in loaders.items() if is_map_style(loader.dataset)}
    ids = {
        name: set(islice(dataset.sample_ids(), len(dataset)))
        for name, dataset in sets.items()
        if callable(getattr(dataset, "sample_ids", None))
    }
    for first, second in combinations(sets, 2):
        if first.split(".")[0] == second.split(".")[0]:
            continue
        overlap = ""
        if first in ids and second in ids:
            if shared := ids[first] & ids[second]:
                overlap = f"{len(shared)} of {len(ids[second])} samples are also in dataset.{first}"
                overlap += f", such as {min(shared, key=str)}"
        elif first == "train" and not open_handle(sets[first], sets[second]):
            count = 0
            with suppress(Exception):  # a sample that cannot be read is reported where it is trained on
                reader = OtherProcess(context_of(loaders[first]._loader), _equal_samples, sets[first], sets[second])
                count = reader.result(_LONGEST)
            if not count:
                continue
            overlap = f"{count} of {min(_SAMPLES, len(sets[second]))} samples checked are also in dataset.{first}"
        if overlap:
            logger.warning("dataset.{}: {}; {}", second, overlap, _ADVICE)


def _equal_samples(train: Any, other: Any) -> int:
    """Count which of a few samples of `other` are in the training data: at the same index from the start or end.

    Transforms of the config are not applied. 0 if it is less than half of them, or if all samples are alike.
    """
    train, other = innermost(train), innermost(other)
    chosen, shift = spread(range(len(other)), _SAMPLES), len(train) - len(other)
    near = {index + offset for index in chosen for offset in (0, shift)} & set(range(len(train)))
    wanted = [_alike(other, index) for index in chosen]
    seen = {_alike(train, index) for index in sorted(near)}
    count = sum(sample in seen for sample in wanted)
    return count if len(set(wanted)) > 1 and 2 * count >= len(wanted) else 0


def _alike(dataset: Any, index: int) -> str:
    """Return the checksum of a sample, which is read with the same random numbers as any other."""
    seed_all(0)
    return checksum(dataset[index])


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Up to `count` of the items, evenly spaced, the first and the last among them."""
    places = np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)
    return [items[index] for index in dict.fromkeys(places.tolist())]
