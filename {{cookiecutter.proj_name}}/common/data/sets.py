"""The data sets of a split: a single one, or several by name."""

import re
from collections.abc import Iterator, Mapping
from itertools import combinations, islice
from typing import Any

from loguru import logger

from common.config import ABSENT, Problem
from common.data.loader import DatasetSection
from common.data.view import is_map_style
from common.distributed import Rank

Sections = dict[str, Mapping[str, Any]]


def sets_of(part: Mapping[str, Any] | None) -> Sections:
    """The sets of a split by name; a single one is called "". Empty if the split is null."""
    if part is None:
        return {}
    return _named(part) or {"": part}


def _named(part: Mapping[str, Any]) -> Sections:
    """The sections in `part`; empty if it is itself the section of a data set, which has a `type`."""
    return {} if "type" in part else {name: item for name, item in part.items() if isinstance(item, Mapping)}


def label(split: str, name: str) -> str:
    """The name of a set in messages: its split, or split.name."""
    return f"{split}.{name}" if name else split


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
                "dataset.{}: {} of {} samples are those of dataset.{} too, such as {}; numbers measured on them do not "
                "show how the model does on new data",
                second,
                len(shared),
                len(other),
                first,
                min(shared, key=str),
            )


class EvaluationSection(DatasetSection):
    """Checks a split: the section of a data set, or names with such sections, `{clean: {type: DigitsDataset}}`.

    A set that is null is left out, so a config can drop a set of its base.
    """

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if not isinstance(value, Mapping) or not _named(value):
            yield from super().check(value, key)
            return
        for name, section in value.items():
            below = f"{key}.{name}"
            if not re.fullmatch(r"[\w-]+", name):
                yield Problem(below, ABSENT, "is not a valid name for a set: use only letters, digits, _ and -")
            else:
                yield from super().check(section, below)
