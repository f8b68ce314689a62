"""Samples that two splits have in common."""

from collections.abc import Mapping
from itertools import combinations, islice
from typing import Any

from loguru import logger

from common.data.view import is_map_style
from common.distributed import Rank


def warn_of_shared_samples(data: Mapping[str, Any], rank: Rank) -> None:
    """Warn of splits that have samples in common, with the count; only data sets with `sample_ids` are compared.

    `sample_ids()` gives one hashable value per sample, the same for the same sample in any split, such as the full path
    of a file.

    Args:
        data: data sets by `label`.
    """
    if not rank.is_main:
        return
    ids = {
        name: set(islice(each.sample_ids(), len(each)))
        for name, each in data.items()
        if callable(getattr(each, "sample_ids", None)) and is_map_style(each)
    }
    for (first, one), (second, other) in combinations(ids.items(), 2):
        if first.split(".")[0] != second.split(".")[0] and (shared := one & other):
            logger.warning(
                f"dataset.{second}: {len(shared)} of {len(other)} samples are also in dataset.{first}, such as "
                f"{min(shared, key=str)}; results on them do not show how the model performs on new data. "
                "Give each split samples of its own: another folder, or parts such as [0, 0.8] and [0.8, 1]"
            )
