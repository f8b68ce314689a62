"""The example metric: accuracy."""

import math

from torch import Tensor
from typing_extensions import Self

from common.base.errors import UserError
from common.config.registry import METRIC_REGISTRY
from common.evaluation.metric import Metric, class_numbers


@METRIC_REGISTRY.register()
class Accuracy(Metric):
    """Share of samples whose label is among the `k` most likely classes, 0..1; of pixels, for masks.

    Labels that are no class, such as -100 or 255, are left out; NaN if there are no others.
    """

    higher_is_better = True

    def __init__(self, k: int = 1) -> None:
        self.k = k
        self.correct = 0
        self.count = 0

    def update(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
        """Reads `logits` (B, classes, ...), 2 classes or more, and `label` (B, ...), or probabilities like `logits`."""
        logits = output["logits"]
        if logits.shape[1] < 2:
            raise UserError("Accuracy needs a logit per class, not one; leave it out: metric: {$REPLACE: true}")
        labels = class_numbers(batch["label"], logits)
        top = logits.topk(self.k, dim=1).indices
        self.correct += int((top == labels[:, None]).sum())
        self.count += int((labels >= 0).sum())

    def merge(self, other: Self) -> None:
        self.correct += other.correct
        self.count += other.count

    def compute(self) -> float:
        if self.count == 0:
            return math.nan
        return self.correct / self.count
