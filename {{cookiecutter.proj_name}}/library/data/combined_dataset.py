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
        self.sets = sets
        self.ends = list(accumulate(map(len, sets)))
        if indices is None:
            indices = range(self.ends[-1])
        self.indices = indices
        self.random = any(getattr(part, "random", True) for part in sets)

    def __len__(self) -> int:
        return len(self.indices)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the number of the dataset that holds a sample, and the index in it."""
        index = int(self.indices[index]) % self.ends[-1]
        number = bisect_right(self.ends, index)
        return number, index - self.ends[number] + len(self.sets[number])

    def __getitem__(self, index: int) -> Any:
        number, inner = self.locate(index)
        return self.sets[number][inner]

    def __getattr__(self, name: str) -> Any:
        """Attributes with a value per sample (`targets`) follow the samples; others (`collate`) are the first set's."""
        if name.startswith("_") or name in ("sets", "whole"):
            raise AttributeError(name)
        if name in ("state_dict", "load_state_dict"):
            if not any(hasattr(part, name) for part in self.sets):
                raise AttributeError(name)
            return getattr(self, f"_{name}")
        if name not in _PER_SAMPLE:
            return getattr(self.sets[0], name)
        values = [getattr(part, name) for part in self.sets]  # AttributeError: one of them has none
        if any(map(callable, values)):
            return lambda: self._in_order([value() if callable(value) else value for value in values])
        return self._in_order(values)

    def _state_dict(self) -> dict[str, Any]:
        """Return the states of the sets; None for one that has none."""
        states = []
        for part in self.sets:
            states.append(part.state_dict() if hasattr(part, "state_dict") else None)
        return {"sets": states}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        for part, own in zip(self.sets, state["sets"], strict=True):
            if own is not None:
                part.load_state_dict(own)

    def _in_order(self, values: list[Any]) -> list[Any]:
        places = map(self.locate, range(len(self)))
        return [values[number][inner] for number, inner in places]

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
        super().__init__([_build(part, mode, data_dir, f"sets[{number}]") for number, part in enumerate(sets)])
        names: dict[tuple[str, ...], str] = {}  # of classes, and the set that has them
        for number, part in enumerate(self.sets):
            classes = tuple(map(str, getattr(part, "classes", ())))
            if classes:
                names.setdefault(classes, f"sets[{number}]")
        if len(names) > 1:
            found = "; ".join(f"{part}: {', '.join(classes)}" for classes, part in names.items())
            raise UserError(f"dataset.{mode}: the sets have other classes, but a label must mean the same: {found}")


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
    """A fixed random part of the samples of a dataset, in their order.

    Args:
        data_dir, mode: passed to the dataset.
        set: its section.
        fraction: the range [0.8, 1.0] of a random order, within 0..1: `[0, 0.8]` and `[0.8, 1]` have no sample in
            common and together contain all.
        seed: seed of that random order.
    """

    def __init__(self, data_dir: Path, mode: str, set: Section, fraction: list[float], seed: int = 0) -> None:
        if len(fraction) != 2 or not 0 <= fraction[0] < fraction[1] <= 1:
            raise UserError(f"dataset.{mode}.fraction: is {fraction}, must be [from, to] within 0..1")
        dataset = _build(set, mode, data_dir, "set")
        size = len(dataset)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        chosen = order[round(fraction[0] * size) : round(fraction[1] * size)]
        super().__init__([dataset], chosen.sort().values)
