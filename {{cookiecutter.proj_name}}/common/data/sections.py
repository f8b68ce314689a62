"""Builds the dataset that a section of the config describes: arguments, transforms, several sets by name."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from common.base.errors import UserError, error_context
from common.config import ABSENT, Problem, section
from common.config.arguments import is_foreign
from common.config.registry import DATASET_REGISTRY, TRANSFORM_REGISTRY
from common.data.keyed import SizedDataset
from common.data.view import View, is_map_style, kind_of

# Keys of a split's section that are not arguments of the dataset.
OWN = ("eval_batch_size",)
_KEY = "image"  # the part of a sample that is apply_transforms unless the config says otherwise


def sets_of(part: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the sets of a split by name; a single one, with a `type`, is called "". Empty if the split is null."""
    if part is None:
        return {}
    sets = {name: item for name, item in part.items() if isinstance(item, Mapping)}
    if "type" in part or not sets:
        return {"": part}
    return sets


def build_dataset(
    part: Mapping[str, Any],
    mode: str,
    data_dir: Path,
    *,
    limit: int = 0,
) -> SizedDataset:
    """Build the dataset of one split.

    Raises:
        UserError: it is empty, cannot be indexed (except for training), or raises one itself (a missing folder, ...).
    """
    dataset = build_set(part, mode, data_dir)
    if not is_map_style(dataset):
        if mode != "train":
            raise UserError(f"dataset.{mode}: {kind_of(dataset)} needs __len__ and __getitem__ to be evaluated on")
        return dataset
    if len(dataset) == 0:
        raise UserError(f"dataset.{mode}: {kind_of(dataset)} has no samples")
    if limit:
        return View(dataset, limit=limit)
    return dataset


def build_set(
    section: Mapping[str, Any],
    mode: str,
    data_dir: Path,
) -> Any:
    """Build the dataset of a section, with its transforms. Raises `UserError` if one of them does."""
    dataset = DATASET_REGISTRY.build(section, ignore=(*OWN, "transforms"), data_dir=data_dir, mode=mode)
    return apply_transforms(dataset, section, mode)


def apply_transforms(
    dataset: Any,
    section: Mapping[str, Any],
    mode: str,
) -> Any:
    """`dataset` with the transforms of a section."""
    transforms = []
    for number, spec in enumerate(section.get("transforms") or ()):
        where = f"dataset.{mode}: transforms[{number}] ({spec['type']})"
        with error_context(lambda where=where: f"in {where}"):  # type: ignore[misc]
            try:
                function = TRANSFORM_REGISTRY.build(spec, ignore=("key",))
            except (TypeError, ValueError) as error:
                if isinstance(error, UserError) or not is_foreign(TRANSFORM_REGISTRY.get(spec["type"])):
                    raise
                raise UserError(f"{spec['type']} rejects its arguments: {error}") from error
        transforms.append(Transform(where, function, spec.get("key", _KEY)))
    if transforms:
        return View(dataset, transforms)
    return dataset


@dataclass(frozen=True)
class Transform:
    """One entry of `transforms`: `where` it is in the config, the function, and the part of a sample that it gets.

    A sample that is no mapping is given whole.
    """

    where: str
    function: Callable[..., Any]
    key: str | None

    @property
    def random(self) -> bool:
        """Whether the function may draw random numbers: true unless its own `random` is false."""
        return bool(getattr(self.function, "random", True))

    def __call__(self, sample: Any) -> Any:
        try:
            if self.key is None or not isinstance(sample, Mapping):
                return self.function(sample)
            if self.key not in sample:
                rule = f"{self.where}: a sample has no {self.key!r}, it has {', '.join(map(str, sample))}"
                raise UserError(f"{rule}; set key to a different field, or to null for the whole sample")
            return {**sample, self.key: self.function(sample[self.key])}
        except UserError:
            raise
        except Exception as error:
            raise RuntimeError(f"{self.where}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class SetSection:
    """Checks the section of a dataset and its `transforms`: `sets: list[Annotated[dict[str, Any], SetSection()]]`.

    Attributes:
        ignore: keys of the section that are not arguments of the dataset. They also survive a change of `type`.
        by_name: it may be null, or several such sections by name, `{clean: {type: DigitsDataset}}`; a set that is null
            is omitted, so a config can drop a set of its base.
    """

    ignore: tuple[str, ...] = ()
    by_name: bool = False

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        if self.by_name and (value is None or (isinstance(value, Mapping) and "" not in sets_of(value))):
            for name, part in (value or {}).items():
                below = f"{key}.{name}"
                if not re.fullmatch(r"[\w-]+", name):
                    rule = "is not a valid name for a set: use only letters, digits, _ and -"
                    yield Problem(below, ABSENT, rule)
                elif part is not None:
                    yield from SetSection(self.ignore).check(part, below)
            return
        yield from DATASET_REGISTRY.check(value, key, ignore=(*self.ignore, "transforms"))
        if not isinstance(value, Mapping):
            return
        size = value.get("eval_batch_size", 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            yield Problem(f"{key}.eval_batch_size", size, "must be an integer, at least 1")
        transforms = value.get("transforms") or []
        if not isinstance(transforms, list):
            yield Problem(f"{key}.transforms", transforms, "must be a list of sections: [{type: ..., arguments}, ...]")
            return
        for number, spec in enumerate(transforms):
            below = f"{key}.transforms[{number}]"
            yield from TRANSFORM_REGISTRY.check(spec, below, ignore=("key",))
            name = spec.get("key") if isinstance(spec, Mapping) else None
            if not isinstance(name, str | None):
                yield Problem(f"{below}.key", name, "must be the name of a field of a sample, or null for all of it")


TrainSection = Annotated[dict[str, Any], SetSection(OWN)]
ValSection = Annotated[dict[str, Any] | None, SetSection(OWN, by_name=True)]
EvalSection = Annotated[dict[str, Any] | None, SetSection(OWN, by_name=True)]


@section
class SplitsConfig:
    """The datasets of a run. Which they are by default is in the project's own package."""

    train: TrainSection = field(default_factory=dict)
    """training data"""
    val: ValSection = None
    """validation data, which choose the best checkpoint; null: none; several: name: {type: ...}"""
    eval: EvalSection = None
    """evaluation data, for the reported numbers; null: none; several: name: {type: ...}"""
