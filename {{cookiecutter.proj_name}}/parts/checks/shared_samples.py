"""Samples that two splits have in common: by what their datasets call them, or by their values."""

from collections.abc import Mapping
from itertools import combinations, islice
from typing import Any

from loguru import logger

from common.data.view import is_map_style

_ADVICE = (
    "results on them do not show how the model performs on new data. Give each split samples of its own: another "
    "folder, or parts such as [0, 0.8] and [0.8, 1]"
)


def warn_of_shared_samples(loaders: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """Warn of splits that have samples in common.

    `sample_ids()` of a dataset gives one hashable value per sample, the same for the same sample in any split, such as
    the full path of a file. Of a dataset without `sample_ids`, the samples that were read before training are compared
    with those of the training data.

    Args:
        loaders: of the datasets, by `label`.
        read: what parts/data_check read of them.
    """
    sets = {name: loader.dataset for name, loader in loaders.items() if is_map_style(loader.dataset)}
    ids = {}
    for name, dataset in sets.items():
        if callable(getattr(dataset, "sample_ids", None)):
            ids[name] = set(islice(dataset.sample_ids(), len(dataset)))
    for first, second in combinations(sets, 2):
        if first.split(".")[0] == second.split(".")[0]:
            continue
        overlap = ""
        if first in ids and second in ids:
            shared = ids[first] & ids[second]
            if shared:
                count = f"{len(shared)} of {len(ids[second])} samples"
                overlap = f"{count} are also in dataset.{first}, such as {min(shared, key=str)}"
        elif first == "train" and first in read and second in read:
            overlap = _overlap(read[first], read[second])
        if overlap:
            logger.warning("dataset.{}: {}; {}", second, overlap, _ADVICE)


def _overlap(train: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say how many of the samples that were read of `other` are equal to some that were read of the training data.

    "" if they are less than half, or if all samples are alike.
    """
    known = list(train["samples"].values())
    wanted = list(other["samples"].values())
    count = sum(sums in known for sums in wanted)
    if 2 * count < len(wanted) or all(sums == wanted[0] for sums in wanted):
        return ""
    return f"{count} of {len(wanted)} samples checked are also in dataset.train"
