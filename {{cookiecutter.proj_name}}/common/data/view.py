"""Data sets around other data sets: transforms of samples, and the sections that describe both."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from common.base.errors import UserError
from common.config import Problem
from common.config.registry import DATASET_REGISTRY, TRANSFORM_REGISTRY

_KEY = "image"  # the part of a sample that is transformed unless the config says otherwise


class View:
    """A data set around another one, `whole`; attributes that it does not define are those of the inner one."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "whole":  # unpickling looks up attributes before any are set
            raise AttributeError(name)
        return getattr(self.whole, name)


def kind_of(dataset: Any) -> str:
    """The name of a data set's class, or of the one inside of its views."""
    while isinstance(dataset, View):
        dataset = dataset.whole
    return type(dataset).__name__


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


class Transformed(View):
    """A data set whose samples go through `transforms`, in the process that reads them."""

    def __init__(self, whole: Any, transforms: Sequence[Transform]) -> None:
        super().__init__(whole)
        self._transforms = transforms
        # A data set that draws nothing need not be seeded, unless a transform draws.
        drawing = any(getattr(each.function, "random", True) for each in transforms)
        self.random = drawing or getattr(whole, "random", True)

    def _apply(self, sample: Any) -> Any:
        for transform in self._transforms:
            sample = transform(sample)
        return sample


class TransformedItems(Transformed):
    """A map-style data set with transforms."""

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> Any:
        return self._apply(self.whole[index])


class TransformedStream(Transformed):
    """A data set that is read in order, with transforms."""

    def __iter__(self) -> Iterator[Any]:
        return map(self._apply, iter(self.whole))


@dataclass(frozen=True)
class NestedSet:
    """Checks the section of a data set inside another one: `sets: list[Annotated[dict[str, Any], NestedSet()]]`."""

    def check(self, value: Any, key: str) -> Iterator[Problem]:
        yield from check_set(value, key)


def check_set(section: Any, key: str, ignore: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Problems of a data set's section and of its `transforms`; `ignore`: further keys that are no arguments."""
    yield from DATASET_REGISTRY.check(section, key, ignore=(*ignore, "transforms"))
    transforms = section.get("transforms") if isinstance(section, Mapping) else None
    if transforms is not None and not isinstance(transforms, list):
        yield Problem(f"{key}.transforms", transforms, "must be a list of sections: [{type: ..., arguments}, ...]")
        return
    for number, each in enumerate(transforms or ()):
        below = f"{key}.transforms[{number}]"
        yield from TRANSFORM_REGISTRY.check(each, below, ignore=("key",))
        if isinstance(each, Mapping) and not isinstance(each.get("key"), str | None):
            yield Problem(f"{below}.key", each["key"], "must be the name of a part of a sample, or null for all of it")


def build_set(section: Mapping[str, Any], mode: str, data_dir: Path, ignore: tuple[str, ...] = ()) -> Any:
    """The data set of a section, with its transforms. Raises `UserError` if one of them does."""
    dataset = DATASET_REGISTRY.build(section, ignore=(*ignore, "transforms"), data_dir=data_dir, mode=mode)
    transforms = [
        Transform(
            f"dataset.{mode}: transforms[{number}] ({each['type']})",
            TRANSFORM_REGISTRY.build(each, ignore=("key",)),
            each.get("key", _KEY),
        )
        for number, each in enumerate(section.get("transforms") or ())
    ]
    if not transforms:
        return dataset
    return TransformedItems(dataset, transforms) if is_map_style(dataset) else TransformedStream(dataset, transforms)


def is_map_style(dataset: Any) -> bool:
    """Whether samples can be indexed, not only read one after the other."""
    # PyTorch's own class for iterables has a `__getitem__`, which only raises an error.
    is_iterable = isinstance(dataset, IterableDataset)
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not is_iterable
