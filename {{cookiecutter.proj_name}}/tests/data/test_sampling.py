"""Orders that draw samples by their weight, or classes equally often."""

from collections import Counter
from typing import Any

from torch import Tensor

from common.data.order import EpochOrder
from tests.data.test_data import Noisy
from tests.samples import Digits


class Labelled(Noisy):
    """Class 0 has nine samples, 1 two, 2 one."""

    targets = (0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 0)

    def __init__(self) -> None:
        super().__init__(12)

    def weights(self) -> list[float]:
        return [0.0, *[1.0] * 9, 3.0, 0.0]


class WeightedDigits(Digits):
    """Digits of which the ones above 4 are drawn three times as often."""

    @property
    def weights(self) -> Tensor:
        return 1.0 + 2.0 * (self.labels > 4)


def order_of(name: str, dataset: Any = None, seed: int = 3, **arguments: Any) -> EpochOrder:
    return EpochOrder({"type": name, **arguments}, dataset or Labelled(), seed)


def test_weights() -> None:
    """With replacement, in proportion: a sample of weight 0 never; by default, as many as there are samples."""
    weighted = order_of("weighted", samples=12_000)
    counts = Counter((weighted(2) % 12).tolist())
    assert set(counts) == set(range(1, 11))
    assert [round(counts[index] / 1000) for index in range(1, 11)] == [1] * 9 + [3]
    assert order_of("weighted").size == 12
    assert weighted(2).tolist() == order_of("weighted", samples=12_000)(2).tolist() != weighted(3).tolist()


def test_classes_equally_often() -> None:
    """Counts differ by one at most, among the classes and within one."""
    for samples, expected in ((None, [4, 4, 4]), (20, [6, 7, 7]), (2, [0, 1, 1])):
        balanced = order_of("balanced", samples=samples)
        for epoch in range(3):
            indices = balanced(epoch) % 12
            labels = Counter(Labelled.targets[index] for index in indices.tolist())
            assert sorted(labels[label] for label in range(3)) == expected
    counts = Counter((order_of("balanced", samples=36)(1) % 12).tolist())
    assert (counts[6], {counts[2], counts[10]}) == (12, {6})
    assert {counts[index] for index in range(12) if Labelled.targets[index] == 0} == {1, 2}
