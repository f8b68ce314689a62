"""Areas under curves over all thresholds. Both metrics rank the samples, so they keep all of them."""

import math

import numpy as np
from torch import Tensor

from common.config.registry import METRIC_REGISTRY, needs
from common.evaluation.metric import GatheredMetric, Results, class_numbers

needs("sklearn")  # imported below, in a run that uses it: 1 s


class CurveMetric(GatheredMetric):
    """Area under a curve of each class against the others, mean over classes, 0..1.

    Classes without samples, or with all samples, are ignored. NaN if none remains, or a probability is not finite.

    Attributes:
        function: of sklearn.metrics, which computes the area.
    """

    higher_is_better = True
    function: str

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        """Reads `probabilities` (B, classes) and `label` (B,). Labels that are no class, such as -100, are left out."""
        labels = class_numbers(batch["label"], output["probabilities"])
        return {"probabilities": output["probabilities"], "label": labels}

    def compute(self, results: Results) -> float:
        from sklearn import metrics

        known = results["label"] >= 0
        probabilities = results["probabilities"][known].double().numpy()
        label = results["label"][known].numpy()
        areas = []
        for number, scores in enumerate(probabilities.T):
            inside = label == number
            if 0 < inside.sum() < len(label) and np.isfinite(probabilities).all():
                areas.append(float(getattr(metrics, self.function)(inside, scores)))
        if not areas:
            return math.nan
        return math.fsum(areas) / len(areas)


@METRIC_REGISTRY.register()
class AreaUnderCurve(CurveMetric):
    """Area under the ROC curve of each class against the others, mean over classes, 0..1.

    For one class, this is the fraction of pairs (a sample of the class, another sample) in which the first has the
    higher probability; ties count half (Hanley and McNeil 1982). Classes with all samples, or none, are ignored.
    """

    function = "roc_auc_score"


@METRIC_REGISTRY.register()
class MeanAveragePrecision(CurveMetric):
    """Average precision of each class against the others, mean over classes, 0..1.

    For one class, this is the sum over all thresholds of the precision times the increase in recall: the area under
    the precision-recall curve as a step function (Davis and Goadrich 2006). Samples with the same probability share a
    threshold. Classes with all samples, or none, are ignored.
    """

    function = "average_precision_score"
