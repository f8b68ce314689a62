"""Areas under curves over all thresholds. Both metrics rank all samples, so they need all of them at once."""

import math
from collections.abc import Callable

from torch import Tensor

from common.config.registry import METRIC_REGISTRY
from common.evaluation.gathered import Results
from common.evaluation.metric import GatheredMetric


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


def _mean_over_classes(area: Callable[[Tensor, Tensor], float], results: Results) -> float:
    probabilities, label = results["probabilities"], results["label"]
    areas = []
    for number in range(probabilities.shape[1]):
        own = label == number
        if 0 < int(own.sum()) < len(own):
            areas.append(area(*_by_score(probabilities[:, number], own)))
    return math.fsum(areas) / len(areas) if areas else math.nan


def _by_score(scores: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Per distinct score, in ascending order: the number of samples of the class, and of other samples."""
    distinct, at = scores.unique(return_inverse=True)
    return at[own].bincount(minlength=len(distinct)), at[~own].bincount(minlength=len(distinct))


def _roc_area(own: Tensor, others: Tensor) -> float:
    below = others.cumsum(0) - others
    # Counts half pairs, so that the sum stays an integer.
    won = int((own * (2 * below + others)).sum())
    return won / (2 * int(own.sum()) * int(others.sum()))


def _average_precision(own: Tensor, others: Tensor) -> float:
    found = own.flip(0).cumsum(0)
    precision = found.double() / (found + others.flip(0).cumsum(0))
    return math.fsum((precision * own.flip(0)).tolist()) / int(own.sum())
