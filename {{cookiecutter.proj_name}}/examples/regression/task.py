"""Regression: the task and its metrics. The loss is PyTorch's, named in config.yaml."""

from torch import Tensor
from typing_extensions import Self

from common.evaluation.metric import GatheredMetric, Metric, Results
from common.task import Task


class RegressionTask(Task):
    """Predicts the mean and the variance of a number.

    A batch is a dict with `x` (B, features) and `y` (B,), both float.
    """

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `mean` and `variance` of y, both (B,)."""
        mean, variance = self.model(batch["x"])
        return {"mean": mean, "variance": variance}


class R2(GatheredMetric):
    """Share of the target's variance that the predicted mean explains, at most 1."""

    higher_is_better = True

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        """Reads `mean` and `y`, both (B,)."""
        return {"mean": output["mean"], "y": batch["y"]}

    def compute(self, results: Results) -> float:
        mean, y = results["mean"].double(), results["y"].double()
        return 1 - float((y - mean).square().sum() / (y - y.mean()).square().sum())


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
