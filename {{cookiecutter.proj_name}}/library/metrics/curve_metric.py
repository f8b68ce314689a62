"""Areas under curves over all thresholds. Both metrics rank the samples, so they keep all of them."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.config.registry import METRIC_REGISTRY, needs
from common.evaluation.labels import class_numbers
from common.evaluation.metric import GatheredMetric, Results
from library.metrics.figures import MOST_CURVES, class_label, draw_curves

needs("sklearn")  # imported below, in a run that uses it: 1 s


class CurveMetric(GatheredMetric):
    """Area under a curve of each class against the others, mean over classes, 0..1.

    Classes without samples, or with all samples, are ignored. NaN if none remains, or a probability is not finite.
    """

    higher_is_better = True
    axes: ClassVar[tuple[str, str]]

    @abstractmethod
    def area(self, inside: NDArray[Any], scores: NDArray[Any]) -> float:
        """Compute the area under the curve; arguments as for `curve`."""

    @abstractmethod
    def curve(self, inside: NDArray[Any], scores: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Compute the points, x and y. `own`: whether each sample is of the class, (N,); `scores`: (N,)."""

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        """Reads `probabilities` (B, classes) and `label` (B,). Labels that are no class, such as -100, are left out."""
        labels = class_numbers(batch["label"], output["probabilities"])
        return {"probabilities": output["probabilities"][labels >= 0], "label": labels[labels >= 0]}

    def compute(self, results: Results) -> float:
        areas = [self.area(inside, scores) for _, inside, scores in _classes(results)]
        return math.fsum(areas) / len(areas) if areas else math.nan

    def figure(self, results: Results, classes: Sequence[str]) -> NDArray[np.uint8]:
        """Draw the curves of the ten classes with the smallest areas."""
        ranking = sorted((self.area(inside, scores), number) for number, inside, scores in _classes(results))
        worst = {number: f"{class_label(classes, number)} {area:.3f}" for area, number in ranking[:MOST_CURVES]}
        points = {number: self.curve(inside, scores) for number, inside, scores in _classes(results) if number in worst}
        return draw_curves({name: points[number] for number, name in worst.items()}, *self.axes)


@METRIC_REGISTRY.register()
class AreaUnderCurve(CurveMetric):
    """Area under the ROC curve of each class against the others, mean over classes, 0..1.

    For one class, this is the fraction of pairs (a sample of the class, another sample) in which the first has the
    higher probability; ties count half (Hanley and McNeil 1982). Classes with all samples, or none, are ignored.
    """

    axes = ("false positive rate", "true positive rate")

    def area(self, inside: NDArray[Any], scores: NDArray[Any]) -> float:
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(inside, scores))

    def curve(self, inside: NDArray[Any], scores: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        from sklearn.metrics import roc_curve

        false_positives, true_positives, _ = roc_curve(inside, scores)
        return false_positives, true_positives


@METRIC_REGISTRY.register()
class MeanAveragePrecision(CurveMetric):
    """Average precision of each class against the others, mean over classes, 0..1.

    For one class, this is the sum over all thresholds of the precision times the increase in recall: the area under
    the precision-recall curve as a step function (Davis and Goadrich 2006). Samples with the same probability share a
    threshold. Classes with all samples, or none, are ignored.
    """

    axes = ("recall", "precision")

    def area(self, inside: NDArray[Any], scores: NDArray[Any]) -> float:
        from sklearn.metrics import average_precision_score

        return float(average_precision_score(inside, scores))

    def curve(self, inside: NDArray[Any], scores: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        from sklearn.metrics import precision_recall_curve

        precision, recall, _ = precision_recall_curve(inside, scores, drop_intermediate=True)
        return recall, precision


def _classes(results: Results) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
    """Yield, for every class that counts: its number, whether a sample is of the class, the sample's probability."""
    probabilities, label = results["probabilities"].double().numpy(), results["label"].numpy()
    for number, scores in enumerate(probabilities.T if np.isfinite(probabilities).all() else ()):
        if 0 < (label == number).sum() < len(label):
            yield number, label == number, scores
