"""Data sets around other data sets: transforms of samples, and the sections that describe both."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from common.base.errors import UserError
from common.config import Problem
from common.config.registry import DATASET_REGISTRY, TRANSFORM_REGISTRY
from common.config.schema import EditorRule

_KEY = "image"  # the part of a sample that is transformed unless the config says otherwise


class Transform(NamedTuple):
    """One entry of `transforms`: `where` it is in the config, the function, and the part of a sample that it gets."""

    where: str
    function: Callable[..., Any]
    key: str | None

    def __call__(self, sample: Any) -> Any:
        try:
            if getattr(self.function, "whole_sample", False):
                return self.function(sample, self.key)
            if self.key is None:
                return self.function(sample)
            if not isinstance(sample, Mapping) or self.key not in sample:
                known = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
                rule = f"{self.where}.key: a sample has no {self.key!r} (it is or has: {known}); name another part, or"
                raise UserError(f"{rule} null for the whole sample")
            return {**sample, self.key: self.function(sample[self.key])}
        except UserError:
            raise
        except Exception as error:
            raise RuntimeError(f"{self.where}: {type(error).__name__}: {error}") from error


class View:
    """A data set around another one, `whole`: all samples, or the first `limit`, go through `transforms` when read.

    It is indexed or read in order, as the inner one is. Attributes that it does not define are those of the inner one.
    """

    def __init__(self, whole: Any, transforms: Sequence[Transform] = (), limit: int = sys.maxsize) -> None:
        self.whole, self._transforms, self._limit = whole, transforms, limit
        # A data set that draws nothing need not be seeded, unless a transform draws.
        drawing = any(getattr(each.function, "random", True) for each in transforms)
        self.random = drawing or getattr(whole, "random", True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "whole":  # unpickling looks up attributes before any are set
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __len__(self) -> int:
        return min(self._limit, len(self.whole))

    def __getitem__(self, index: int) -> Any:
        return self._apply(self.whole[index])

    def __iter__(self) -> Iterator[Any]:
        return map(self._apply, islice(iter(self.whole), self._limit))

    def _apply(self, sample: Any) -> Any:
        for transform in self._transforms:
            sample = transform(sample)
        return sample


def _innermost(dataset: Any) -> Any:
    while isinstance(dataset, View):
        dataset = dataset.whole
    return dataset


def kind_of(dataset: Any) -> str:
    """The name of a data set's class, or of the one inside of its views."""
    return type(_innermost(dataset)).__name__


class SetSection(EditorRule):
    """Checks the section of a data set and its `transforms`: `sets: list[Annotated[dict[str, Any], SetSection()]]`.

    `ignore`: keys of the section that are not arguments of the data set. They also survive a change of `type`.
    """

    ignore: tuple[str, ...] = ()

    def editor_rule(self) -> dict[str, Any]:
        """The section of a data set."""
        transforms = {"items": TRANSFORM_REGISTRY.editor_rule(key={"type": ["string", "null"]})}
        return DATASET_REGISTRY.editor_rule(transforms=transforms, **{name: {} for name in self.ignore})

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        yield from DATASET_REGISTRY.check(value, key, ignore=(*self.ignore, "transforms"))
        transforms = value.get("transforms") if isinstance(value, Mapping) else None
        if transforms is not None and not isinstance(transforms, list):
            yield Problem(f"{key}.transforms", transforms, "must be a list of sections: [{type: ..., arguments}, ...]")
            return
        for number, each in enumerate(transforms or ()):
            below = f"{key}.transforms[{number}]"
            yield from TRANSFORM_REGISTRY.check(each, below, ignore=("key",))
            if isinstance(each, Mapping) and not isinstance(each.get("key"), str | None):
                said = "must be the name of a part of a sample, or null for all of it"
                yield Problem(f"{below}.key", each["key"], said)


def build_set(section: Mapping[str, Any], mode: str, data_dir: Path, ignore: tuple[str, ...] = ()) -> Any:
    """The data set of a section, with its transforms. Raises `UserError` if one of them does."""
    dataset = DATASET_REGISTRY.build(section, ignore=(*ignore, "transforms"), data_dir=data_dir, mode=mode)
    return transformed(dataset, section, mode)


def transformed(dataset: Any, section: Mapping[str, Any], mode: str) -> Any:
    """`dataset` with the transforms of a section."""
    transforms = [
        Transform(
            f"dataset.{mode}: transforms[{number}] ({each['type']})",
            TRANSFORM_REGISTRY.build(each, ignore=("key",)),
            each.get("key", _KEY),
        )
        for number, each in enumerate(section.get("transforms") or ())
    ]
    return View(dataset, transforms) if transforms else dataset


def is_map_style(dataset: Any) -> bool:
    """Whether samples can be indexed, not only read one after the other."""
    inner = _innermost(dataset)
    # PyTorch's own class for iterables has a `__getitem__`, which only raises an error.
    return hasattr(inner, "__len__") and hasattr(inner, "__getitem__") and not isinstance(inner, IterableDataset)
