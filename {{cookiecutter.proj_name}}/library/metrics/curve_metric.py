"""Areas under curves over all thresholds. Both metrics rank the samples, so they keep all of them."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.config.registry import METRIC_REGISTRY, needs
from common.evaluation.metric import GatheredMetric, Results, class_numbers

needs("sklearn")  # imported below, in a run that uses it: 1 s


class CurveMetric(GatheredMetric):
    """Area under a curve of each class against the others, mean over classes, 0..1.

    Classes without samples, or with all samples, are ignored. NaN if none remains, or a probability is not finite.
    """

    higher_is_better = True

    @abstractmethod
    def area(self, inside: NDArray[Any], scores: NDArray[Any]) -> float:
        """Compute the area. `inside`: whether each sample is of the class, (N,); `scores`: its probability, (N,)."""

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        """Reads `probabilities` (B, classes) and `label` (B,). Labels that are no class, such as -100, are left out."""
        labels = class_numbers(batch["label"], output["probabilities"])
        return {"probabilities": output["probabilities"][labels >= 0], "label": labels[labels >= 0]}

    def compute(self, results: Results) -> float:
        areas = [self.area(inside, scores) for inside, scores in _classes(results)]
        return math.fsum(areas) / len(areas) if areas else math.nan


@METRIC_REGISTRY.register()
class AreaUnderCurve(CurveMetric):
    """Area under the ROC curve of each class against the others, mean over classes, 0..1.

    For one class, this is the fraction of pairs (a sample of the class, another sample) in which the first has the
    higher probability; ties count half (Hanley and McNeil 1982). Classes with all samples, or none, are ignored.
    """

    def area(self, inside: NDArray[Any], scores: NDArray[Any]) -> float:
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(inside, scores))


@METRIC_REGISTRY.register()
class MeanAveragePrecision(CurveMetric):
    """Average precision of each class against the others, mean over classes, 0..1.

    For one class, this is the sum over all thresholds of the precision times the increase in recall: the area under
    the precision-recall curve as a step function (Davis and Goadrich 2006). Samples with the same probability share a
    threshold. Classes with all samples, or none, are ignored.
    """

    def area(self, inside: NDArray[Any], scores: NDArray[Any]) -> float:
        from sklearn.metrics import average_precision_score

        return float(average_precision_score(inside, scores))


def _classes(results: Results) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield, for every class that counts: whether a sample is of the class, and the sample's probability."""
    probabilities = results["probabilities"].double().numpy()
    label = results["label"].numpy()
    if not np.isfinite(probabilities).all():
        return
    for number, scores in enumerate(probabilities.T):
        inside = label == number
        if 0 < inside.sum() < len(label):
            yield inside, scores
