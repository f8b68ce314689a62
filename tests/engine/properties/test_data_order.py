"""Which samples each optimizer step sees: the same for every split, from any position, each once per epoch."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from common.base.errors import UserError
from common.data.loader import LoaderConfig, Step, TrainStream
from common.data.order import EpochOrder, EpochPlan, GlobalBatch
from common.progress import Position, resumed_position
from tests.conftest import Runs, load
from tests.data.test_data import Noisy, evaluation_shares

ORDERS = ("shuffle", "sequential", "weighted", "balanced")


@dataclass(frozen=True)
class Split:
    """How the samples of a step are shared."""

    batch_size: int
    accumulate: int
    world_size: int

    @property
    def samples(self) -> int:
        return self.batch_size * self.accumulate * self.world_size

    def plan(self, order: EpochOrder, rank: int = 0, **more: bool) -> EpochPlan:
        split = {"batch_size": self.batch_size, "accumulate": self.accumulate, "world_size": self.world_size}
        return EpochPlan(order.size, rank=rank, **split, **more)

    def steps(self, order: EpochOrder, at: Position = Position(), **more: bool) -> list[list[GlobalBatch]]:  # noqa: B008
        """Return what each rank sees in each step of the rest of an epoch, by step."""
        plans = [self.plan(order, rank, **more) for rank in range(self.world_size)]
        ranks = [list(plan.global_batches(order(at.epoch), at)) for plan in plans]
        assert len({len(steps) for steps in ranks}) == 1
        return [list(step) for step in zip(*ranks, strict=True)]


class Rated(Noisy):
    """Samples with classes and weights, for the orders that need them."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.labels = [number % 7 % 3 for number in range(size)]
        self.weights = [1.0 + number % 4 for number in range(size)]


SIZES, SEEDS, EPOCHS = st.integers(1, 70), st.integers(0, 99), st.integers(0, 3)
SPLITS = st.builds(Split, st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))


@st.composite
def orders(draw: Any) -> EpochOrder:
    return EpochOrder({"type": draw(st.sampled_from(ORDERS))}, Rated(draw(SIZES)), draw(SEEDS))


@st.composite
def equal_splits(draw: Any) -> tuple[Split, Split]:
    """Return two splits of the same number of samples per step."""
    factors = draw(st.lists(st.sampled_from((2, 2, 3)), max_size=4))
    made = []
    for _ in range(2):
        place = [draw(st.integers(0, 2)) for _ in factors]
        numbers = [prod(factor for factor, at in zip(factors, place, strict=True) if at == part) for part in range(3)]
        made.append(Split(*numbers))
    return made[0], made[1]


def share_of(batch: GlobalBatch) -> list[int]:
    """Return the samples of a rank in a step, none of those that it borrows."""
    return [index for indices, size in zip(batch.indices, batch.sizes, strict=True) for index in indices[:size]]


def together(step: list[GlobalBatch], in_blocks: bool = False) -> list[int]:
    """Return the samples of a step in the order of the epoch, from the shares of its ranks."""
    shares = [share_of(batch) for batch in step]
    dealt = chain.from_iterable(shares if in_blocks else zip_longest(*shares))
    return [index for index in dealt if index is not None]


def steps_of(order: EpochOrder, epoch: int, samples: int, first: int = 0, drop_last: bool = False) -> list[list[int]]:
    """Return the documented steps, without a plan: the order of the epoch, cut into pieces of `samples`."""
    left, steps = order(epoch).tolist()[first:], []
    while left and (len(left) >= samples or not drop_last):
        steps.append(left[:samples])
        del left[:samples]
    return steps


@given(orders(), EPOCHS, equal_splits(), st.booleans(), st.booleans())
def test_a_step_sees_the_same_samples_however_it_is_split(
    order: EpochOrder, epoch: int, splits: tuple[Split, Split], drop_last: bool, in_blocks: bool
) -> None:
    """Batch sizes, accumulation and ranks of equal product see the same samples in the same order in every step."""
    documented = steps_of(order, epoch, splits[0].samples, drop_last=drop_last)
    for split in splits:
        if not documented:
            with pytest.raises(UserError, match="no optimizer step"):
                split.plan(order, drop_last=drop_last)
            continue
        steps = split.steps(order, Position(epoch=epoch), drop_last=drop_last, in_blocks=in_blocks)
        assert [together(step, in_blocks) for step in steps] == documented
        assert {batch.samples for step in steps for batch in step} == {len(step) for step in documented}
        assert len(steps) == split.plan(order).steps_per_epoch - (drop_last and order.size % split.samples > 0)


@given(orders(), EPOCHS, SPLITS)
def test_ranks_take_part_alike_and_weigh_each_sample_alike(order: EpochOrder, epoch: int, split: Split) -> None:
    """Every rank has as many batches, none empty, and their weighted means average to the mean over the step."""
    for step in split.steps(order, Position(epoch=epoch)):
        assert len({len(batch.indices) for batch in step}) == 1
        assert all(0 < len(indices) <= split.batch_size for batch in step for indices in batch.indices)
        assert len({batch.after for batch in step}) == 1
        mean = 0.0
        for batch in step:
            for indices, size, weight in zip(batch.indices, batch.sizes, batch.weights, strict=True):
                assert size in (0, len(indices))
                mean += weight * sum(indices) / len(indices) / split.world_size
        assert mean == pytest.approx(sum(together(step)) / step[0].samples)


@given(orders(), EPOCHS, st.integers(1, 4), st.integers(1, 8), st.sampled_from((1, 2, 4, 8)))
def test_blocks_are_the_same_batches_on_any_number_of_ranks(
    order: EpochOrder, epoch: int, batch_size: int, accumulate: int, world: int
) -> None:
    """With `in_blocks`, the micro-batches of all ranks are those of one process that accumulates them all."""
    alone, shared = Split(batch_size, accumulate * world, 1), Split(batch_size, accumulate, world)
    at = Position(epoch=epoch)
    for (whole,), parts in zip(
        alone.steps(order, at, in_blocks=True), shared.steps(order, at, in_blocks=True), strict=True
    ):
        pieces = [
            (indices, weight / world)
            for part in parts
            for indices, weight, size in zip(part.indices, part.weights, part.sizes, strict=True)
            if size
        ]
        assert pieces == list(zip(whole.indices, whole.weights, strict=True))  # dividing by 2 rounds nothing


@given(orders(), EPOCHS, equal_splits(), st.booleans(), st.data())
def test_a_resume_continues_exactly(
    order: EpochOrder, epoch: int, splits: tuple[Split, Split], drop_last: bool, data: st.DataObject
) -> None:
    """From any step, with the same or another split of as many samples, the rest is that of the uncut run."""
    before, after = splits
    assume(order.size >= before.samples or not drop_last)
    uncut = before.steps(order, Position(epoch=epoch), drop_last=drop_last)
    cut = data.draw(st.integers(0, len(uncut) - 1), "steps before the cut")
    at = uncut[cut - 1][0].after if cut else Position(epoch=epoch)
    fresh = EpochOrder({"type": order.name}, order.dataset, order.seed)
    resumed = after.steps(fresh, at, drop_last=drop_last)
    assert [together(step) for step in resumed] == [together(step) for step in uncut[cut:]]
    assert [step[0].after for step in resumed] == [step[0].after for step in uncut[cut:]]
    assert resumed[-1][0].after == Position(len(uncut), epoch + 1, 0, order.size)
    for first, second in pairwise([step[0].after for step in uncut]):
        assert second.step == first.step + 1


@given(orders(), EPOCHS, SPLITS, SPLITS, st.booleans(), st.integers(0, 69))
@example(EpochOrder({"type": "sequential"}, Rated(3), 0), 0, Split(1, 1, 1), Split(3, 1, 1), True, 1)  # no step is left
def test_a_resume_with_other_steps_uses_each_sample_once(
    order: EpochOrder, epoch: int, before: Split, after: Split, drop_last: bool, cut: int
) -> None:
    """With more or fewer samples per step, too, the cut epoch has each sample once, less than a step dropped."""
    assume(not drop_last or order.size >= max(before.samples, after.samples))
    first = before.steps(order, Position(epoch=epoch), drop_last=drop_last)
    cut %= len(first)
    at = first[cut - 1][0].after if cut else Position(epoch=epoch, epoch_size=order.size)
    resumed = resumed_position(at, order.size, after.samples if drop_last else 1)
    rest = after.steps(order, resumed, drop_last=drop_last)
    assert rest, "without a step, the loop would never come to the next epoch"
    assert [step[0].after.epoch for step in rest] == [*[resumed.epoch] * (len(rest) - 1), resumed.epoch + 1]
    seen = [index for step in first[:cut] + (rest if resumed.epoch == epoch else []) for index in together(step)]
    assert seen == order(epoch).tolist()[: len(seen)]
    assert order.size - len(seen) < (after.samples if drop_last else 1)
    assert (resumed.epoch > epoch) is (resumed != at), "nothing else moves a run"


def test_a_run_goes_on_where_less_than_a_step_is_left(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `drop_last` and larger steps than before the cut, a run once looked for a step for ever."""
    epoch, begun = TrainStream.epoch, Counter[Position]()

    def watched(stream: TrainStream, at: Position) -> Iterator[Step]:
        begun[at] += 1
        assert begun[at] == 1, "the same place twice"
        return epoch(stream, at)

    words = ["--loader.drop_last", "true", "--progress.epoch_val", "-1"]
    runs.train(*words, "--progress.max_steps", "4")
    monkeypatch.setattr(TrainStream, "epoch", watched)
    folder = runs.train(*words, "--batch_size", "100", "--resume", "auto", "--allow_changes", "true")
    assert load(folder)["position"]["epoch"] == 2
    assert {at.sample for at in begun} == {0}


@given(st.sampled_from(ORDERS), SIZES, SEEDS, EPOCHS)
def test_what_an_epoch_holds(name: str, size: int, seed: int, epoch: int) -> None:
    """An epoch has each sample once; with `balanced`, classes and the samples of a class equally often but for one."""
    dataset = Rated(size)
    order = EpochOrder({"type": name}, dataset, seed)
    numbers = order(epoch).tolist()
    assert len(numbers) == len(set(numbers)) == order.size == size, "each occurrence has a number of its own"
    assert EpochOrder({"type": name}, dataset, seed)(epoch).tolist() == numbers
    occurrences = Counter(number % size for number in numbers)
    if name in ("shuffle", "sequential"):
        assert sorted(numbers) == list(range(size))
    if name == "balanced":
        classes = {label: [at for at in range(size) if dataset.labels[at] == label] for label in set(dataset.labels)}
        often = [sum(occurrences[at] for at in members) for members in classes.values()]
        assert max(often) - min(often) <= 1
        for members in classes.values():
            times = [occurrences[at] for at in members]
            assert max(times) - min(times) <= 1


@given(SIZES, st.integers(1, 9), st.integers(1, 6))
def test_an_evaluation_has_each_sample_once_in_the_same_batches(size: int, batch_size: int, world: int) -> None:
    """Any number of ranks evaluates the same batches, each on one rank, and shares differ by at most one batch."""
    shares = evaluation_shares(size, batch_size, world)
    dealt = [batch for turn in zip_longest(*shares) for batch in turn if batch is not None]
    assert dealt == [list(range(size))[first : first + batch_size] for first in range(0, size, batch_size)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@settings(max_examples=max(5, settings.default.max_examples // 10))  # each starts processes
@given(st.integers(1, 20), SEEDS, SPLITS, st.integers(0, 2), st.data())
def test_workers_change_nothing(size: int, seed: int, split: Split, worker: int, data: st.DataObject) -> None:
    """Workers and resumes leave every sample and its random numbers as they are in one process without workers."""

    def read(worker: int, at: Position) -> list[Any]:
        order = EpochOrder({"type": "shuffle"}, range(size), seed)
        plan = split.plan(order, rank)
        stream = TrainStream(Noisy(size), order, plan, LoaderConfig(), worker=worker, device=torch.device("cpu"))
        steps = [
            ([(batch["index"].tolist(), batch["noise"].tolist()) for batch in step.batches], step.global_batch.after)
            for step in stream.epoch(at)
        ]
        stream.close()
        return steps

    rank = data.draw(st.integers(0, split.world_size - 1), "rank")
    alone = read(0, Position())
    cut = data.draw(st.integers(0, len(alone) - 1), "steps before the cut")
    assert read(worker, alone[cut - 1][1] if cut else Position()) == alone[cut:]
