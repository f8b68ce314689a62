"""Builds the dataset that a section of the config describes: arguments, several sets by name."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from common.base.errors import UserError
from common.base.parts import fill, needs_part, part
from common.config import ABSENT, Problem, section
from common.config.registry import DATASET_REGISTRY
from common.data.keyed import SizedDataset
from common.data.view import View, is_map_style, kind_of

# Keys of a split's section that are not arguments of the dataset.
OWN = ("eval_batch_size",)


def sets_of(split: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the sets of a split by name; a single one, with a `type`, is called "". Empty if the split is null."""
    if split is None:
        return {}
    sets = {name: item for name, item in split.items() if isinstance(item, Mapping)}
    if "type" in split or not sets:
        return {"": split}
    return sets


def build_dataset(
    settings: Mapping[str, Any],
    mode: str,
    data_dir: Path,
    *,
    limit: int = 0,
) -> SizedDataset:
    """Build the dataset of one split.

    Raises:
        UserError: it is empty, or raises one itself (a missing folder, ...).
    """
    dataset = build_set(settings, mode, data_dir)
    if not is_map_style(dataset):
        return dataset
    if len(dataset) == 0:
        raise UserError(f"dataset.{mode}: {kind_of(dataset)} has no samples")
    if limit:
        return View(dataset, limit=limit)
    return dataset


def build_set(
    settings: Mapping[str, Any],
    mode: str,
    data_dir: Path,
) -> Any:
    """Build the dataset of a section, with its transforms if this project has parts/transforms."""
    dataset = DATASET_REGISTRY.build(settings, ignore=(*OWN, "transforms"), data_dir=data_dir, mode=mode)
    return fill("transforms", "steps", dataset, dataset, settings, mode)


@dataclass(frozen=True)
class SetSection:
    """Checks the section of a dataset: `sets: list[Annotated[dict[str, Any], SetSection()]]`.

    Attributes:
        ignore: keys of the section that are not arguments of the dataset. They also survive a change of `type`.
        by_name: it may be null, or several such sections by name, `{clean: {type: DigitsDataset}}`; a set that is null
            is omitted, so a config can drop a set of its base.
    """

    ignore: tuple[str, ...] = ()
    by_name: bool = False

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if self.by_name and (value is None or (isinstance(value, Mapping) and "" not in sets_of(value))):
            for name, one in (value or {}).items():
                below = f"{key}.{name}"
                if not re.fullmatch(r"[\w-]+", name):
                    rule = "is not a valid name for a set: use only letters, digits, _ and -"
                    yield Problem(below, ABSENT, rule)
                elif one is not None:
                    yield from SetSection(self.ignore).check(one, below)
            return
        yield from DATASET_REGISTRY.check(value, key, ignore=(*self.ignore, "transforms"))
        if not isinstance(value, Mapping):
            return
        size = value.get("eval_batch_size", 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            yield Problem(f"{key}.eval_batch_size", size, "must be an integer, at least 1")
        transforms = value.get("transforms")
        if not transforms:
            return
        steps = part("transforms", "steps")
        if steps is None:
            yield Problem(f"{key}.transforms", ABSENT, needs_part("transforms"))
        else:
            yield from steps.problems(transforms, f"{key}.transforms")


TrainSection = Annotated[dict[str, Any], SetSection(OWN)]
ValSection = Annotated[dict[str, Any] | None, SetSection(OWN, by_name=True)]


@section
class SplitsConfig:
    """The datasets of a run. Their defaults are in the project's own package."""

    train: TrainSection = field(default_factory=dict)
    """training data"""
    val: ValSection = None
    """validation data, which choose the best checkpoint; null: none; several: name: {type: ...}"""
    eval: ValSection = None
    """evaluation data, for the reported numbers; null: none; several: name: {type: ...}"""
