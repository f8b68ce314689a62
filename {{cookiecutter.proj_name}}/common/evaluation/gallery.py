"""Which samples of a set are drawn: its first ones, or the worst of the whole set."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.distributed import Rank, gather_to_main
from common.monitor.pictures import Picture


class Gallery:
    """Collects the pictures of one pass over a set: those of the main process' first samples.

    A task names its class, `Task.gallery`; one that draws other samples derives from it.

    Args:
        task: the `Task`, whose `pictures` draws.
        limit: the most pictures.
        fixed: the same samples are to be shown in every pass, so that progress is seen.
    """

    def __init__(self, task: Any, rank: Rank, limit: int, *, fixed: bool = False) -> None:
        self.task = task
        self.rank = rank
        self.limit = limit
        self.fixed = fixed
        self.pictures: list[Picture] = []

    def add(self, output: Any, batch: Any, indices: Sequence[int] | None = None) -> None:
        """Consider a batch after `post_process`. `indices`: of its samples in the dataset; None: unknown."""
        if self.rank.is_main and len(self.pictures) < self.limit:
            self.pictures += self.task.pictures(output, batch, self.limit - len(self.pictures))

    def finish(self) -> list[Picture]:
        """Return the pictures, on the main process. Every process of `rank` must call this."""
        return self.pictures


class SampleScore(NamedTuple):
    """How wrong one sample is, and its group: its class, so that not all pictures are of one."""

    wrong: bool
    loss: float
    group: Hashable = None


class _Candidate(NamedTuple):
    """A sample that may be shown: number in the dataset, and row of the batch.

    `sample`: its part of the output and of the batch, or its pictures; None while it is only a row.
    """

    error: SampleScore
    number: int
    row: int
    sample: Any = None


class WorstFirst(Gallery):
    """Wrong samples first, each group in turn, the highest loss first; the same ones on any number of processes.

    If `fixed`, each group in turn in the order of the dataset. No more samples are kept than are shown: one that is
    left out cannot be among the first ones later, since others of its group only push it back.

    The task says how wrong each sample of a batch is, after `post_process`, in a method `sample_errors(output, batch)`
    that returns a `SampleScore` for each. Its `pictures` is called with batches of one sample.
    """

    kept: Sequence[_Candidate] = ()

    def add(self, output: Any, batch: Any, indices: Sequence[int] | None = None) -> None:
        errors = self.task.sample_errors(output, batch)
        indices = range(len(errors)) if indices is None else indices
        if len(errors) != len(indices):
            raise UserError(f"sample_errors must give one SampleScore per sample: {len(errors)} for {len(indices)}")
        news = [_Candidate(error, number, row) for row, (error, number) in enumerate(zip(errors, indices, strict=True))]
        kept: list[_Candidate] = []
        for item in self._first([*self.kept, *news]):
            if not item.sample:
                item = item._replace(sample=_copy((output, batch), item.row, len(indices)))
            kept.append(item)
        self.kept = kept

    def _first(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Return the first `limit` candidates in the order of showing."""
        turns: Counter[Hashable] = Counter()
        ordered: list[tuple[bool, int, int, _Candidate]] = []
        for item in sorted(candidates, key=lambda item: (0 if self.fixed else -_number(item.error.loss), item.number)):
            wrong = item.error.wrong and not self.fixed
            turns[wrong, item.error.group] += 1
            ordered.append((not wrong, turns[wrong, item.error.group], len(ordered), item))
        return [item for *_, item in sorted(ordered)[: self.limit]]

    def finish(self) -> list[Picture]:
        drawn = [item._replace(sample=self.task.pictures(item.sample[0], item.sample[1], 1)) for item in self.kept]
        everything = [item for kept in gather_to_main(drawn, self.rank) for item in kept]
        return [picture for item in self._first(everything) for picture in item.sample]


def _number(loss: float) -> float:
    """NaN has no place in an order; it is the worst of all."""
    return math.inf if math.isnan(loss) else loss


def _copy(values: Any, number: int, size: int) -> Any:
    """Return one sample of a batch of `size`, as a batch of one on the CPU."""
    return map_tensors(rows(values, slice(number, number + 1), size), lambda item: item.detach().to("cpu", copy=True))


def rows(values: Any, part: slice, size: int) -> Any:
    """Some samples of a batch or an output of `size` samples: a part of whatever has one entry per sample."""
    if isinstance(values, Mapping):
        return {key: rows(value, part, size) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(rows(value, part, size) for value in values)
    if isinstance(values, list) and len(values) == size:
        return values[part]
    return map_tensors(values, lambda item: item[part] if item.ndim > 0 and len(item) == size else item)
