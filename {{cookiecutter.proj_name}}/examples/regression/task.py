"""Regression: the task and its metrics. The loss is PyTorch's, named in config.yaml."""

from torch import Tensor
from typing_extensions import Self

from common.evaluation.exact import ExactSum
from common.evaluation.metric import Metric
from common.task import Task


class RegressionTask(Task):
    """Predicts the mean and the variance of a number.

    A batch is a dict with `x` (B, features) and `y` (B,), both float.
    """

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `mean` and `variance` of y, both (B,)."""
        mean, variance = self.model(batch["x"])
        return {"mean": mean, "variance": variance}


class R2(Metric):
    """Share of the target's variance that the predicted mean explains, at most 1.

    Sums are exact, so the value does not depend on how the samples are divided among processes.
    """

    higher_is_better = True

    def __init__(self) -> None:
        self.samples = 0
        self.sum, self.squares, self.errors = ExactSum(), ExactSum(), ExactSum()

    def update(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
        """Reads `mean` and `y`, both (B,)."""
        self.samples += len(batch["y"])
        for mean, y in zip(output["mean"].tolist(), batch["y"].tolist(), strict=True):
            self.sum.add(y)
            self.squares.add(y * y)
            self.errors.add((y - mean) ** 2)

    def merge(self, other: Self) -> None:
        self.samples += other.samples
        self.sum.merge(other.sum)
        self.squares.merge(other.squares)
        self.errors.merge(other.errors)

    def compute(self) -> float:
        return 1 - self.errors.value / (self.squares.value - self.sum.value**2 / self.samples)


class Coverage(Metric):
    """Share of targets within an interval around the mean that should hold 90 % of them, 0..1: best at 0.9."""

    higher_is_better = None

    def __init__(self) -> None:
        self.inside = self.samples = 0

    def update(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
        """Reads `mean`, `variance` and `y`, all (B,)."""
        distance = (batch["y"] - output["mean"]).abs() / output["variance"].sqrt()
        self.inside += int((distance < 1.6449).sum())  # 90 % of a normal distribution
        self.samples += len(distance)

    def merge(self, other: Self) -> None:
        self.inside += other.inside
        self.samples += other.samples

    def compute(self) -> float:
        return self.inside / self.samples
