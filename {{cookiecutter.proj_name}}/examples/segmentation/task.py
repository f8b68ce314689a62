"""Segmentation: the task and its metric. The loss is PyTorch's, named in config.yaml."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from common.evaluation.metric import Metric
from common.task import Picture, Task
from examples.segmentation.data import CLASSES, IGNORED

COLOURS = torch.tensor([[0.1, 0.1, 0.1], [0.9, 0.3, 0.2], [0.2, 0.7, 0.3], [0.2, 0.4, 0.9], [1.0, 1.0, 1.0]])


class SegmentationTask(Task):
    """Predicts a class for every pixel.

    A batch is a dict with `image` (B, C, H, W), float, and `mask` (B, H, W), int64: a class, or `IGNORED`.
    """

    unit = "pixels"

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `logits` (B, classes, H, W)."""
        return {"logits": self.model(batch["image"])}

    def count(self, batch: dict[str, Tensor]) -> int:
        """Count the pixels that are not ignored: the mean loss is over them."""
        return int((batch["mask"] != IGNORED).sum())

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds `prediction` (B, H, W), the most likely class."""
        return {**output, "prediction": output["logits"].argmax(dim=1)}

    def pictures(self, output: dict[str, Tensor], batch: dict[str, Tensor], limit: int) -> list[Picture]:
        """Image, mask and prediction side by side; ignored pixels are white."""
        masks = torch.stack([batch["mask"], output["prediction"]], dim=1)[:limit].cpu()
        colours = COLOURS[masks.clamp(max=len(CLASSES))]  # (limit, 2, H, W, 3)
        images = batch["image"][:limit, 0, :, :, None].cpu().float().expand_as(colours[:, 0])
        rows = torch.cat([images, colours[:, 0], colours[:, 1]], dim=2)
        return [Picture(row.numpy(), "image, mask, prediction") for row in rows]


class MeanIoU(Metric):
    """Intersection over union of the pixels of each class, mean over the classes that occur, 0..1.

    Args:
        classes: number of classes.
    """

    higher_is_better = True

    def __init__(self, classes: int = len(CLASSES)) -> None:
        self.pixels = torch.zeros(classes, classes, dtype=torch.int64)  # by class and predicted class

    def update(self, output: dict[str, Tensor], batch: dict[str, Any]) -> None:
        """Reads `prediction` and `mask`, both (B, H, W)."""
        counted = batch["mask"] != IGNORED
        pairs = batch["mask"][counted] * len(self.pixels) + output["prediction"][counted]
        self.pixels += pairs.cpu().bincount(minlength=self.pixels.numel()).view_as(self.pixels)

    def merge(self, other: Self) -> None:
        self.pixels += other.pixels

    def compute(self) -> float:
        common = self.pixels.diagonal()
        union = self.pixels.sum(0) + self.pixels.sum(1) - common
        return float((common[union > 0].double() / union[union > 0]).mean())
