"""Which samples of a set are drawn, the first ones or the worst of the whole set, and where their pictures go."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from common.base.errors import UserError
from common.base.files import warn_on_oserror
from common.base.nested import map_tensors
from common.distributed import Rank, gather_to_main
from common.monitor.result import SplitResult
from common.task import Task
from common.trainer import Trainer
from parts.pictures.classification import class_errors, pictures
from parts.pictures.config import PicturesConfig
from parts.pictures.draw import Pixels, draw, mosaic, save_png


def build(config: Any) -> "Gallery | None":
    """Fill the seat `gallery` of a run with this config; None if no pictures are wanted."""
    if config.pictures.number == 0:
        return None
    return Gallery(config.pictures)


class Gallery:
    """Draws samples of each pass over a set, and shows and saves the pictures."""

    def __init__(self, config: PicturesConfig) -> None:
        self.config = config

    def begin(self, task: Task, rank: Rank, split: str) -> "Selection":
        """Begin a pass over a set of `split`, or over a part of it that `rank` has."""
        return Selection(task, rank, self.config.number, fixed=split == "val")

    def show(self, trainer: Trainer, split: str, result: SplitResult) -> None:
        """Show the pictures of an evaluation."""
        for name, measured in result.sets.items():
            self.write(trainer, f"{split}/{name}" if name else split, measured.pictures)

    def write(self, trainer: Trainer, split: str, pictures: Sequence[Pixels]) -> None:
        """Show pictures of the `split` (or split/set) data together, and if wanted, in a file.

        The group of the writers, "view", comes after the curves.
        """
        if not pictures or not trainer.rank.is_main:
            return
        together = mosaic(pictures)
        step = trainer.at.step
        trainer.monitor.recorder.write("image", step, f"view/{split}", together)
        if self.config.files:
            with warn_on_oserror("a picture"):
                save_png(trainer.paths.root / "progress" / split / f"step_{step:08}.png", together)

    def save(self, folder: Path, result: SplitResult) -> None:
        """Write the pictures of an evaluation into its folder; named sets get a folder each."""
        for name, measured in result.sets.items():
            for number, picture in enumerate(measured.pictures):
                save_png(folder / name / f"{number:02}.png", picture)


def rows(values: Any, part: slice, size: int) -> Any:
    """Some samples of a batch or an output of `size` samples: a part of whatever has one entry per sample."""
    if isinstance(values, Mapping):
        return {key: rows(value, part, size) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(rows(value, part, size) for value in values)
    if isinstance(values, list) and len(values) == size:
        return values[part]
    return map_tensors(values, lambda item: item[part] if item.ndim > 0 and len(item) == size else item)


class _Candidate(NamedTuple):
    """A sample that may be shown.

    Attributes:
        wrong, loss, group: as the task says, see `Task.sample_errors`.
        number: in the dataset.
        sample: its part of output and batch, or its pictures; before it is copied, its row in the batch.
    """

    wrong: bool
    loss: float
    group: Hashable
    number: int
    sample: Any


class Selection:
    """Collects the pictures of one pass over a set.

    If the errors of samples are known: wrong ones first, each group in turn, the highest loss first; the same ones on
    any number of processes. If `fixed`, each group in turn in the order of the dataset, so that progress is seen. No
    more samples are kept than are shown: one that is left out cannot be among the first ones later, since others of its
    group only push it back. Otherwise: the first samples of the main process.

    Args:
        limit: the most pictures.
    """

    def __init__(self, task: Task, rank: Rank, limit: int, *, fixed: bool = False) -> None:
        self.task = task
        self.rank = rank
        self.limit = limit
        self.fixed = fixed
        self.kept: list[_Candidate] = []
        self.first: list[Pixels] = []

    def add(self, output: Any, batch: Any, indices: Sequence[int] | None = None) -> None:
        """Consider a batch after `post_process`. `indices`: of its samples in the dataset; None: unknown."""
        errors: Sequence[tuple[bool, float, Hashable]] | None
        if type(self.task).sample_errors is Task.sample_errors:
            errors = class_errors(output, batch)
            if errors is not None and indices is not None and len(errors) != len(indices):
                errors = None  # an item of the dataset is a batch
        else:
            errors = self.task.sample_errors(output, batch)
        if errors is None:
            if self.rank.is_main and len(self.first) < self.limit:
                self.first += map(draw, pictures(self.task, output, batch, self.limit - len(self.first)))
            return
        size = len(errors)
        if indices is None:
            indices = range(size)
        if len(indices) != size:
            raise UserError(f"sample_errors gave {size} entries for {len(indices)} samples; it must give one for each")
        news = [_Candidate(*error, indices[row], row) for row, error in enumerate(errors)]
        self.kept = self._first([*self.kept, *news])
        for position, item in enumerate(self.kept):
            if isinstance(item.sample, int):  # a copy of its row, as a batch of one on the CPU
                one = rows((output, batch), slice(item.sample, item.sample + 1), size)
                sample = map_tensors(one, lambda tensor: tensor.detach().to("cpu", copy=True))
                self.kept[position] = item._replace(sample=sample)

    def _first(self, candidates: Iterable[_Candidate]) -> list[_Candidate]:
        """Return the first `limit` candidates in the order of showing."""

        def rank(item: _Candidate) -> tuple[float, int]:
            if self.fixed:
                return 0.0, item.number
            if math.isnan(item.loss):  # the worst of all
                return -math.inf, item.number
            return -item.loss, item.number

        turns: Counter[Hashable] = Counter()
        ordered: list[tuple[bool, int, int, _Candidate]] = []
        for place, item in enumerate(sorted(candidates, key=rank)):
            is_right = self.fixed or not item.wrong
            turns[is_right, item.group] += 1
            ordered.append((is_right, turns[is_right, item.group], place, item))
        return [item for *_, item in sorted(ordered)[: self.limit]]

    def finish(self) -> list[Pixels]:
        """Return the drawn pictures, on the main process. Every process of `rank` must call this."""
        drawn: list[_Candidate] = []
        for item in self.kept:
            output, batch = item.sample
            drawn.append(item._replace(sample=list(map(draw, pictures(self.task, output, batch, 1)))))
        shown = list(self.first)
        for item in self._first(chain.from_iterable(gather_to_main(drawn, self.rank))):
            shown += item.sample
        return shown
