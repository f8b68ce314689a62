"""Metric learning: the task, a loss with weights of its own, and a metric over all pairs of a dataset."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, one_hot

from common.evaluation.metric import GatheredMetric, Results
from common.task import Task


class EmbeddingTask(Task):
    """Learns points for images such that images of one class are close.

    A batch is a dict with `image` (B, C, H, W), float in 0..1, and `label` (B,), int64.
    """

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `embedding` (B, dimensions), of length 1."""
        return {"embedding": self.model(batch["image"])}


class ArcFace(nn.Module):
    """Cross entropy of the angles to one point per class, the right one made harder by a margin (Deng et al. 2019).

    The points are weights of the loss: trained, averaged and saved with the model, and not needed to use it.

    Args:
        dimensions: numbers per point.
        classes: number of classes.
        margin: added to the angle to the right class, in radians.
        scale: factor of the cosines, which lie in -1..1, to make logits of them.
    """

    def __init__(self, dimensions: int, classes: int = 10, margin: float = 0.3, scale: float = 16.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, dimensions))
        self.margin, self.scale = margin, scale

    def forward(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Reads `embedding` (B, dimensions) and `label` (B,). Returns the mean over the batch."""
        cosine = cosine_similarity(output["embedding"][:, None], self.weight, dim=2)
        angle = cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos()  # the slope of acos is infinite at its ends
        harder = angle + self.margin * one_hot(batch["label"], len(self.weight))
        return cross_entropy(self.scale * harder.clamp(max=math.pi).cos(), batch["label"])


class RecallAt1(GatheredMetric):
    """Share of samples whose nearest other sample of the dataset is of the same class, 0..1."""

    higher_is_better = True

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Results:
        """Reads `embedding` (B, dimensions) and `label` (B,)."""
        return {"embedding": output["embedding"].float(), "label": batch["label"]}

    def compute(self, results: Results) -> float:
        similarity = results["embedding"] @ results["embedding"].T
        nearest = similarity.fill_diagonal_(-2.0).argmax(dim=1)
        return float((results["label"][nearest] == results["label"]).double().mean())
