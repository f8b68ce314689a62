"""Areas under curves over all thresholds. Both metrics rank all samples, so they need all of them at once."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config.registry import METRIC_REGISTRY
from common.evaluation.gathered import Results
from common.evaluation.metric import GatheredMetric
from library.metrics.figures import MOST_CURVES, class_label, draw_curves


@METRIC_REGISTRY.register()
class AreaUnderCurve(GatheredMetric):
    """Area under the ROC curve of each class against the others, mean over classes, 0..1.

    For one class, this is the fraction of pairs (a sample of the class, another sample) in which the first has the
    higher probability; ties count half (Hanley and McNeil 1982). Classes of all samples, or of none, are left out.
    """

    higher_is_better = True

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        """Reads `probabilities` (B, classes) and `label` (B,)."""
        return {"probabilities": output["probabilities"], "label": batch["label"]}

    def compute(self, results: Results) -> float:
        return _mean_over_classes(_roc_area, results)

    def figure(self, results: Results, classes: Sequence[str]) -> NDArray[np.uint8]:
        """The ROC curves of the ten classes with the smallest areas."""
        return _draw_worst(_roc_area, _roc_curve, results, classes, ("false positive rate", "true positive rate"))


@METRIC_REGISTRY.register()
class MeanAveragePrecision(GatheredMetric):
    """Average precision of each class against the others, mean over classes, 0..1.

    For one class, this is the sum over all thresholds of the precision times the increase in recall: the area under
    the precision-recall curve as a step function (Davis and Goadrich 2006). Samples with the same probability share a
    threshold. Classes of all samples, or of none, are left out.
    """

    higher_is_better = True

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        """Reads `probabilities` (B, classes) and `label` (B,)."""
        return {"probabilities": output["probabilities"], "label": batch["label"]}

    def compute(self, results: Results) -> float:
        return _mean_over_classes(_average_precision, results)

    def figure(self, results: Results, classes: Sequence[str]) -> NDArray[np.uint8]:
        """The precision-recall curves of the ten classes with the lowest average precision."""
        return _draw_worst(_average_precision, _precision_recall, results, classes, ("recall", "precision"))


def _mean_over_classes(area: Callable[[Tensor, Tensor], float], results: Results) -> float:
    areas = [area(*counts) for counts in _counts(results).values()]
    return math.fsum(areas) / len(areas) if areas else math.nan


def _counts(results: Results) -> dict[int, tuple[Tensor, Tensor]]:
    """`_by_score` of each class that some samples have and others have not."""
    probabilities, label = results["probabilities"], results["label"]
    own = {number: label == number for number in range(probabilities.shape[1])}
    return {
        number: _by_score(probabilities[:, number], is_own)
        for number, is_own in own.items()
        if 0 < int(is_own.sum()) < len(is_own)
    }


def _draw_worst(
    area: Callable[[Tensor, Tensor], float],
    curve: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    results: Results,
    classes: Sequence[str],
    axes: tuple[str, str],
) -> NDArray[np.uint8]:
    counts = _counts(results)
    areas = {number: area(*each) for number, each in counts.items()}
    curves = {}
    for number in sorted(areas, key=areas.__getitem__)[:MOST_CURVES]:
        x, y = curve(*counts[number])
        chosen = torch.linspace(0, len(x) - 1, min(len(x), 1000)).round().long()  # more points than pixels
        curves[f"{class_label(classes, number)} {areas[number]:.3f}"] = torch.stack([x, y], 1)[chosen].tolist()
    return draw_curves(curves, *axes)


def _by_score(scores: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Per distinct score, in ascending order: the number of samples of the class, and of other samples."""
    distinct, at = scores.unique(return_inverse=True)
    return at[own].bincount(minlength=len(distinct)), at[~own].bincount(minlength=len(distinct))


def _roc_area(own: Tensor, others: Tensor) -> float:
    below = others.cumsum(0) - others
    # Counts half pairs, so that the sum stays an integer.
    won = int((own * (2 * below + others)).sum())
    return won / (2 * int(own.sum()) * int(others.sum()))


def _roc_curve(own: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of the other samples and of the class' own that are above each threshold, from the highest one down."""
    below = [torch.cat([torch.zeros(1), counts.flip(0).cumsum(0) / counts.sum()]) for counts in (others, own)]
    return below[0], below[1]


def _precision_recall(own: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Recall and precision at each threshold, from the highest one down."""
    found = own.flip(0).cumsum(0)
    return found / own.sum(), found / (found + others.flip(0).cumsum(0))


def _average_precision(own: Tensor, others: Tensor) -> float:
    found = own.flip(0).cumsum(0)
    precision = found.double() / (found + others.flip(0).cumsum(0))
    return math.fsum((precision * own.flip(0)).tolist()) / int(own.sum())
