"""Which samples of a set are drawn: kept while the set is evaluated, never more than are shown."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from common.base.errors import UserError
from common.data.move import map_tensors
from common.distributed import Rank, gather_to_main
from common.monitor.pictures import Picture

if TYPE_CHECKING:
    from common.task import Task


class SampleError(NamedTuple):
    """How wrong one sample is: wrong ones are shown first, each `group` (the class) in turn, the highest loss first."""

    wrong: bool
    loss: float
    group: Hashable = None


class _Candidate(NamedTuple):
    """A sample that may be shown: number in the data set, and its part of the output and of the batch; or a picture."""

    error: SampleError
    index: int
    sample: Any


class ChosenSamples:
    """The samples to draw, at most `limit` of them, whatever the size of the set and the order of its batches.

    A sample that is left out once cannot be among the first ones later: others of its group only push it back.

    Args:
        fixed: choose by group and number alone, so that the same samples are shown each time.
    """

    def __init__(self, limit: int, fixed: bool) -> None:
        self.limit, self.fixed = limit, fixed
        self.kept: list[_Candidate] = []

    def add(self, errors: Sequence[SampleError], output: Any, batch: Any, indices: Sequence[int]) -> None:
        """Consider the samples `indices` of the data set, of which `errors` are in the same order."""
        if len(errors) != len(indices):
            raise UserError(f"sample_errors must give one SampleError per sample: {len(errors)} for {len(indices)}")
        rows = dict(zip(indices, range(len(indices)), strict=True))
        news = [_Candidate(error, index, None) for error, index in zip(errors, indices, strict=True)]
        self.kept = [
            each._replace(sample=_row((output, batch), rows[each.index], len(indices))) if each.sample is None else each
            for each in self._first([*self.kept, *news])
        ]

    def _first(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """The first `limit` candidates in the order of showing."""
        turn: Counter[Hashable] = Counter()
        ordered = []
        for each in sorted(candidates, key=lambda each: (0 if self.fixed else -_number(each.error.loss), each.index)):
            wrong = each.error.wrong and not self.fixed
            turn[wrong, each.error.group] += 1
            ordered.append((not wrong, turn[wrong, each.error.group], len(ordered), each))
        return [each for *_, each in sorted(ordered)[: self.limit]]

    def draw(self, task: "Task") -> list[Picture]:
        """A picture of each sample that this process has kept."""
        self.kept = [each._replace(sample=task.pictures(*each.sample, 1)) for each in self.kept]
        return [picture for each in self.kept for picture in each.sample]

    def gather(self, task: "Task", rank: Rank) -> list[Picture]:
        """Pictures of the samples of all processes, on the main process. Every process must call this."""
        self.draw(task)
        self.kept = [each for kept in gather_to_main(self.kept, rank) for each in kept]
        return [picture for each in self._first(self.kept) for picture in each.sample]


def _number(loss: float) -> float:
    """NaN has no place in an order; it is the worst of all."""
    return math.inf if math.isnan(loss) else loss


def _row(values: Any, number: int, size: int) -> Any:
    """One sample of a batch of `size`, as a batch of one on the CPU: of whatever has one entry per sample."""
    if isinstance(values, Mapping):
        return {key: _row(value, number, size) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_row(value, number, size) for value in values)
    if isinstance(values, list) and len(values) == size:
        return [values[number]]

    def cut(tensor: Tensor) -> Tensor:
        is_cut = tensor.ndim > 0 and len(tensor) == size
        return (tensor[number : number + 1] if is_cut else tensor).detach().to("cpu", copy=True)

    return map_tensors(values, cut)
