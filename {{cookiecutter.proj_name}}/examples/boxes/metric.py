"""Average precision of boxes."""

from typing import Any

import torch
from torch import Tensor

from common.evaluation.metric import GatheredMetric, Results


class AveragePrecision(GatheredMetric):
    """Area under the precision-recall curve of each class, mean over the classes that occur, 0..1.

    The precision at a recall is the highest at this or a larger one, as in PASCAL VOC since 2010. A box found is right
    if it overlaps one of its class that no more probable one has taken.

    Args:
        overlap: least intersection over union.
    """

    higher_is_better = True

    def __init__(self, overlap: float = 0.5) -> None:
        self.overlap = overlap

    def results(self, output: dict[str, Tensor], batch: dict[str, Any]) -> Results:
        """Reads `found` (B, most, 6), and the lists `boxes` (n, 4) and `label` (n,)."""
        sizes = [len(label) for label in batch["label"]]
        # One copy from the device for all samples, not one for each.
        boxes, label = (torch.cat(batch[name]).cpu().split(sizes) for name in ("boxes", "label"))
        return {"found": output["found"].float(), "boxes": list(boxes), "label": list(label)}

    def compute(self, results: Results) -> float:
        boxes = results["found"].flatten(0, 1)
        images = zip(results["found"], results["boxes"], results["label"], strict=True)
        right = torch.cat([self.right(*image) for image in images])
        order = boxes[:, 4].argsort(descending=True, stable=True)
        kind, right, label = boxes[order, 5], right[order], torch.cat(results["label"])
        areas = [_area(right[kind == number], int((label == number).sum())) for number in label.unique()]
        return float(torch.stack(areas).mean())

    def right(self, predicted: Tensor, boxes: Tensor, label: Tensor) -> Tensor:
        """Return which of the boxes found in one image (most, 6), the most probable first, are right (most,)."""
        overlaps = _overlaps(predicted[:, :4], boxes.float()) * (predicted[:, 5:] == label)
        right = torch.zeros(len(predicted), dtype=torch.bool)
        for number, row in enumerate(overlaps):
            best, at = row.max(dim=0)
            right[number] = best >= self.overlap
            overlaps[:, at] *= ~right[number]
        return right


def _overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of each of n boxes with each of m: (n, m)."""
    low = torch.maximum(first[:, None, :2], second[:, :2])
    high = torch.minimum(first[:, None, 2:], second[:, 2:])
    common = (high - low).clamp(min=0).prod(dim=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(dim=1) for boxes in (first, second)]
    return common / (areas[0][:, None] + areas[1] - common)


def _area(right: Tensor, boxes: int) -> Tensor:
    """Area under the curve of one class: `right` for each box found, the most probable first; `boxes` to be found."""
    precision = right.double().cumsum(0) / torch.arange(1, len(right) + 1)
    return precision.flip(0).cummax(0).values.flip(0)[right].sum() / boxes
