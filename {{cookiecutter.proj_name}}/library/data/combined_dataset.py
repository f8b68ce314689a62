"""Datasets made of other datasets: Concat, Repeat and Subset. Their sections nest in the config."""

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch

from common.base.errors import UserError
from common.config.registry import DATASET_REGISTRY
from common.data.keyed import set_epoch
from common.data.sections import SetSection, build_set
from common.data.view import is_map_style

Section = Annotated[dict[str, Any], SetSection()]
_PER_SAMPLE = ("sample_ids", "targets", "labels", "weights")  # they have one value per sample


class _Combined:
    """Samples of several datasets: `indices` numbers them through all sets, and from the start again after the last.

    Without `indices`, each sample once.
    """

    def __init__(self, sets: list[Any], indices: Any = None) -> None:
        self.sets, self.ends = sets, list(accumulate(map(len, sets)))
        self.indices = range(self.ends[-1]) if indices is None else indices
        self.random = any(getattr(part, "random", True) for part in sets)

    def __len__(self) -> int:
        return len(self.indices)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the dataset that holds a sample, and the index in it."""
        index = int(self.indices[index]) % self.ends[-1]
        number = bisect_right(self.ends, index)
        return number, index - (self.ends[number - 1] if number else 0)

    def __getitem__(self, index: int) -> Any:
        number, inner = self.locate(index)
        return self.sets[number][inner]

    def __getattr__(self, name: str) -> Any:
        """Attributes with a value per sample (`targets`) follow the samples; others (`collate`) are the first set's."""
        if name.startswith("_") or name in ("sets", "whole"):
            raise AttributeError(name)
        if name in ("state_dict", "load_state_dict"):
            return self._state_of_sets(name)
        values = [getattr(part, name) for part in self.sets]  # AttributeError: one of them has none
        if name in _PER_SAMPLE:  # attributes, or methods
            called = [value() if callable(value) else value for value in values]
            return (lambda: self._in_order(called)) if callable(values[0]) else self._in_order(called)
        return values[0]

    def _state_of_sets(self, name: str) -> Any:
        """Return the method `name`, for the sets that have a state; None stands for that of the others."""
        methods = [getattr(part, name, None) for part in self.sets]
        if not any(methods):
            raise AttributeError(name)
        if name == "state_dict":
            return lambda: {"sets": [method() if method else None for method in methods]}
        return lambda state: [m(item) for m, item in zip(methods, state["sets"], strict=True) if m]

    def _in_order(self, values: list[Any]) -> list[Any]:
        return [values[number][inner] for number, inner in map(self.locate, range(len(self)))]

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the datasets that have `set_epoch`."""
        for part in self.sets:
            set_epoch(part, epoch)


def _build(section: dict[str, Any], mode: str, data_dir: Path, key: str) -> Any:
    dataset = build_set(section, mode, data_dir)
    if not is_map_style(dataset):
        raise UserError(f"dataset.{mode}: {key} is a {section['type']}, which can only be read in order, not by index")
    return dataset


@DATASET_REGISTRY.register()
class Concat(_Combined):
    """Several datasets, one after the other.

    Args:
        data_dir, mode: passed to each of them.
        sets: sections of the datasets: `[{type: DigitsDataset}, {type: ImageFolderDataset, folder: more}]`. All must
            have the same classes.
    """

    def __init__(self, data_dir: Path, mode: str, sets: list[Section]) -> None:
        if not sets:
            raise UserError(f"dataset.{mode}.sets: is empty; list the sections of one or more datasets")
        super().__init__([_build(part, mode, data_dir, f"sets[{at}]") for at, part in enumerate(sets)])
        named = [(at, tuple(names)) for at, part in enumerate(self.sets) if (names := getattr(part, "classes", None))]
        for at, names in named:
            if names != named[0][1]:
                first = f"sets[{named[0][0]}] has {', '.join(map(str, named[0][1]))}"
                said = f"sets[{at}] has the classes {', '.join(map(str, names))}, but {first}"
                raise UserError(f"dataset.{mode}: {said}; a label must mean the same in all of them")


@DATASET_REGISTRY.register()
class Repeat(_Combined):
    """A dataset several times over: more steps per epoch, and a larger share in a `Concat`.

    The repetitions of a sample are augmented differently.

    Args:
        data_dir, mode: passed to the dataset.
        set: its section.
        times: how often each sample is used, at least 1.
    """

    def __init__(self, data_dir: Path, mode: str, set: Section, times: int) -> None:
        if times < 1:
            raise UserError(f"dataset.{mode}.times: is {times}, must be at least 1")
        dataset = _build(set, mode, data_dir, "set")
        super().__init__([dataset], range(len(dataset) * times))


@DATASET_REGISTRY.register()
class Subset(_Combined):
    """A fixed part of the samples of a dataset, in their order. Give `indices` or `fraction`.

    Args:
        data_dir, mode: passed to the dataset.
        set: its section.
        indices: indices of the samples, counted from 0, in this order.
        fraction: a random share of the samples: 0.1, or the range [0.8, 1.0] of a random order: `[0, 0.8]` and
            `[0.8, 1]` have no sample in common and together contain all.
        seed: seed of that random order.
    """

    def __init__(
        self,
        data_dir: Path,
        mode: str,
        set: Section,
        indices: list[int] | None = None,
        fraction: float | list[float] | None = None,
        seed: int = 0,
    ) -> None:
        if (indices is None) == (fraction is None):
            raise UserError(f"dataset.{mode}: Subset needs indices or fraction, one of them")
        dataset = _build(set, mode, data_dir, "set")
        size = len(dataset)
        if fraction is not None:
            chosen = _share(fraction, size, seed, mode)
        else:
            chosen = torch.tensor(indices, dtype=torch.int64)
            bad = chosen[(chosen < 0) | (chosen >= size)]
            if len(bad):
                raise UserError(f"dataset.{mode}.indices: there is no sample {int(bad[0])}; the dataset has {size}")
        super().__init__([dataset], chosen)


def _share(fraction: float | list[float], size: int, seed: int, mode: str) -> torch.Tensor:
    """Return the indices in a range of a random order, ascending."""
    low, high = fraction if isinstance(fraction, list) and len(fraction) == 2 else (0.0, fraction)
    if isinstance(high, list) or not 0 <= low < high <= 1:
        raise UserError(f"dataset.{mode}.fraction: is {fraction}, must be a number or [from, to] within 0..1")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return order[round(low * size) : round(high * size)].sort().values
