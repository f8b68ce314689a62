"""Losses, metrics and sums of gradients are the same number for every way to share the samples."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.distributed import Rank
from common.evaluation.loss import LossSums
from common.evaluation.metric import GatheredMetric, MetricDict, MetricFactory, Results
from common.monitor.meter import to_floats
from parts.reduction.tree import Branches, add_leaf, leaves_here
from tests.data.test_data import evaluation_shares

VALUES = st.floats(-1e6, 1e6, allow_subnormal=False) | st.sampled_from((0.1, 1e16, -1e16, 1e-30))


@contextmanager
def gathered(objects: Sequence[Any]) -> Iterator[None]:
    """Stand in for the exchange: the objects of all processes, in rank order."""
    with (
        patch("common.evaluation.loss.gather_objects", lambda value, rank: list(objects)),
        patch("common.evaluation.metric.gather_objects", lambda value, rank: list(objects)),
        patch("common.evaluation.metric.gather_to_main", lambda value, rank: list(objects)),
    ):
        yield


def means_of(ranks: Sequence[LossSums]) -> tuple[dict[str, float], int]:
    """Return the means over all ranks, by the first."""
    shares = []
    for sums in ranks:
        shares.append(list(zip(sums._counts, to_floats(sums._losses), strict=True)))
    with gathered(shares):
        return ranks[0].means(Rank(world_size=len(ranks)))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), VALUES), min_size=1, max_size=12), st.data())
@example([(1, 1, 1e16), (1, 1, 1.0), (1, 1, -1e16)], None)
def test_a_mean_loss_is_rounded_once(batches: list[tuple[int, int, float]], data: st.DataObject | None) -> None:
    """Dealt to any number of processes in any order, batches give the exact sum, rounded once, over the count.

    NaN if nothing counts.
    """

    def shared(world: int, order: Sequence[int]) -> tuple[dict[str, float], int]:
        ranks = [LossSums() for _ in range(world)]
        for turn, number in enumerate(order):
            samples, count, mean = batches[number]
            value = torch.tensor(mean if count else math.nan, dtype=torch.float64)
            ranks[turn % world].add({"loss": value, "part": 2 * value}, samples, count)
        return means_of(ranks)

    usual = shared(1, range(len(batches)))
    for world in (2, 3, len(batches) + 1):
        order = data.draw(st.permutations(range(len(batches)))) if data else range(len(batches))
        assert shared(world, order) == usual
    total, means = sum(count for _, count, _ in batches), [mean * count for _, count, mean in batches if count]
    if total:
        assert usual[0]["loss"] == float(sum(map(Fraction, means), Fraction(0))) / total
    else:
        assert math.isnan(usual[0]["loss"])
    assert usual[1] == sum(samples for samples, _, _ in batches)


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=40), st.data())
def test_a_mean_loss_does_not_depend_on_the_batches(losses: list[int], data: st.DataObject) -> None:
    """Any cut of the samples into batches, on any ranks, gives the mean over the samples but for rounding."""
    world = data.draw(st.integers(1, 4))
    ranks, left = [LossSums() for _ in range(world)], list(losses)
    while left:
        batch = left[: data.draw(st.integers(1, len(left)))]
        del left[: len(batch)]
        mean = torch.tensor(batch, dtype=torch.float64).mean()
        ranks[data.draw(st.integers(0, world - 1))].add({"loss": mean}, len(batch), len(batch))
    means, samples = means_of(ranks)
    assert samples == len(losses)
    assert means["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12, abs=1e-9)


METRICS = {"Accuracy": None, "top2": {"type": "Accuracy", "k": 2}, "ConfusionMatrix": {"per_class": True}}
CURVES = {"AreaUnderCurve": None, "MeanAveragePrecision": None, "order": {"type": f"{__name__}.InOrder"}}
CLASSES = 3


class InOrder(GatheredMetric):
    """A number that every change of the order of the samples changes."""

    def results(self, output: Any, batch: Any) -> Results:
        return {"probabilities": output["probabilities"]}

    def compute(self, results: Results) -> float:
        return float(sum(place * row[0] for place, row in enumerate(results["probabilities"].tolist())))


def measured(scores: Tensor, labels: Tensor, shares: Sequence[Sequence[Sequence[int]]], sections: Any) -> Any:
    """Return the metrics of samples whose batches are dealt to ranks: rank, batch, indices."""
    ranks: list[MetricDict] = []
    for batches in shares:
        seen = MetricDict(MetricFactory(sections), Rank(world_size=len(shares)))
        for indices in batches:
            logits = scores[list(indices)]
            output = {"logits": logits, "prediction": logits.argmax(1), "probabilities": logits.softmax(1)}
            seen.update(output, {"label": labels[list(indices)]}, indices)
        ranks.append(seen)
    values: dict[str, float] = {}
    for name in sections:  # each with the objects of its own exchange
        objects: list[Any] = [rank._metrics[name] for rank in ranks]
        if name in CURVES:
            objects = [rank._batches[name] for rank in ranks]
        part = MetricDict(MetricFactory({name: sections[name]}), Rank(world_size=len(ranks)))
        part._batches[name] = ranks[0]._batches[name]
        with gathered(objects), patch("common.evaluation.metric.from_main", lambda value, rank: value):
            values |= part.compute()
    return values


@st.composite
def samples(draw: Any) -> tuple[Tensor, Tensor]:
    size = draw(st.integers(1, 30))
    scores = draw(st.lists(st.integers(-3, 3), min_size=size * CLASSES, max_size=size * CLASSES))  # with ties
    labels = draw(st.lists(st.integers(0, CLASSES - 1), min_size=size, max_size=size))
    return torch.tensor(scores, dtype=torch.float64).reshape(size, CLASSES), torch.tensor(labels)


def same_numbers(first: dict[str, float], second: dict[str, float]) -> bool:
    pairs = [(first[name], second[name]) for name in first]
    return first.keys() == second.keys() and all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


@settings(max_examples=settings.default.max_examples // 2)
@given(samples(), st.integers(1, 8), st.integers(1, 5))
def test_metrics_are_the_same_on_any_number_of_processes(
    data: tuple[Tensor, Tensor], batch_size: int, world: int
) -> None:
    """Every metric has the same bits on one process with one batch, and in an evaluation shared by several."""
    scores, labels = data
    whole = [[list(range(len(labels)))]]
    dealt = evaluation_shares(len(labels), batch_size, world)
    sections = METRICS | CURVES
    assert same_numbers(measured(scores, labels, dealt, sections), measured(scores, labels, whole, sections))


@settings(max_examples=settings.default.max_examples // 2)
@given(samples(), st.data())
def test_counted_metrics_take_any_partition(data: tuple[Tensor, Tensor], more: st.DataObject) -> None:
    """Counts do not mind batches of samples from anywhere, and are those that are counted by hand."""
    scores, labels = data
    order, world = more.draw(st.permutations(range(len(labels)))), more.draw(st.integers(1, 4))
    shares: list[list[list[int]]] = [[] for _ in range(world)]
    left = list(order)
    while left:
        size = more.draw(st.integers(1, len(left)))
        shares[more.draw(st.integers(0, world - 1))].append(left[:size])
        del left[:size]
    values = measured(scores, labels, shares, METRICS)
    predicted = scores.argmax(1)
    pairs = list(zip(labels.tolist(), predicted.tolist(), strict=True))
    recalls = []
    for number in range(CLASSES):
        right = sum(1 for label, guess in pairs if label == guess == number)
        of_class = [label for label, _ in pairs if label == number]
        if of_class:
            assert values[f"ConfusionMatrix.recall_{number}"] == right / len(of_class)
            recalls.append(right / len(of_class))
        else:
            assert math.isnan(values[f"ConfusionMatrix.recall_{number}"])
    assert values["ConfusionMatrix.balanced_accuracy"] == math.fsum(recalls) / len(recalls)
    in_two = sum(bool((scores[at].topk(2).indices == labels[at]).any()) for at in range(len(labels)))
    assert values["top2"] == pytest.approx(in_two / len(labels), abs=1e-12)


@given(st.integers(0, 4), st.integers(0, 4), st.data())
def test_a_tree_has_the_same_bits_on_any_number_of_processes(depth: int, ranks: int, data: st.DataObject) -> None:
    """The branches that processes add along the tree, added pair by pair, are the tree of one process, to the bit."""
    leaves, world = 2**depth, 2 ** min(ranks, depth)
    values = data.draw(st.lists(VALUES, min_size=leaves, max_size=leaves))
    terms = [torch.tensor([value, -value / 3], dtype=torch.float32) for value in values]

    def branch(part: list[Tensor]) -> Tensor:
        branches: Branches = []
        for term in part:
            add_leaf(branches, [term.clone()])
        [(count, [total])] = branches
        assert count == len(part)
        return total

    share = leaves_here(leaves, Rank(world_size=world))
    shards = torch.stack([branch(terms[first : first + share]) for first in range(0, leaves, share)])
    while len(shards) > 1:  # as `sum_branches` does with what it received
        shards = shards[0::2] + shards[1::2]
    assert shards[0].numpy().tobytes() == branch(terms).numpy().tobytes()
