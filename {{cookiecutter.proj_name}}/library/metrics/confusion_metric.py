"""The confusion matrix, and the scores derived from it."""

import math

import torch
from torch import Tensor
from typing_extensions import Self

from common.config.registry import METRIC_REGISTRY
from common.evaluation.metric import Metric, class_numbers


@METRIC_REGISTRY.register()
class ConfusionMatrix(Metric):
    """Balanced accuracy and macro F1, from counts of (label, prediction), 0..1.

    With TP, FP and FN of each class, recall is TP / (TP + FN), precision TP / (TP + FP) and F1 2 TP / (2 TP + FP + FN)
    (Sokolova and Lapalme 2009). `balanced_accuracy` is the mean recall over classes that have samples, `macro_f1` the
    mean F1 over classes that have samples or predictions. Labels that are no class, such as -100, are left out; a
    prediction that is none counts as a wrong one, of no class.

    Args:
        per_class: also return `recall_<class>` and `precision_<class>`; NaN if the denominator is 0.
    """

    higher_is_better = True

    def __init__(self, per_class: bool = False) -> None:
        self.per_class = per_class
        self.counts = torch.zeros(1, 1, dtype=torch.int64)  # (classes, classes + 1) after the first update

    def update(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
        """Reads `logits` (B, classes), `prediction` (B,) and `label` (B,)."""
        classes = output["logits"].shape[1]
        labels = class_numbers(batch["label"], output["logits"])
        predictions = output["prediction"]
        is_class = (predictions >= 0) & (predictions < classes)
        columns = predictions.masked_fill(~is_class, classes)  # the last one: of no class
        cells = (labels * (classes + 1) + columns)[labels >= 0].bincount(minlength=classes * (classes + 1))
        self.counts = self.counts + cells.reshape(classes, classes + 1).cpu()

    def merge(self, other: Self) -> None:
        self.counts = self.counts + other.counts

    def compute(self) -> dict[str, float]:
        right = self.counts.diagonal().double()
        labelled = self.counts.sum(dim=1)
        predicted = self.counts[:, :-1].sum(dim=0)
        recall, precision = (right / labelled).tolist(), (right / predicted).tolist()  # NaN where nothing was counted
        values = {"balanced_accuracy": _mean(recall), "macro_f1": _mean((2 * right / (labelled + predicted)).tolist())}
        if self.per_class:
            values |= {f"recall_{number}": value for number, value in enumerate(recall)}
            values |= {f"precision_{number}": value for number, value in enumerate(precision)}
        return values


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
