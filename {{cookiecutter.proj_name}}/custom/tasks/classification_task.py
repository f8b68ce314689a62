"""Image classification: connects model, losses, metrics and pictures."""

from typing import Any

from torch import Tensor

from common.config.registry import TASK_REGISTRY
from common.monitor.pictures import Picture, labelled
from common.task import Task
from custom.datasets.sample_transform import original


@TASK_REGISTRY.register()
class ClassificationTask(Task):
    """Predicts one of several classes for each image.

    A batch is a dict with `image` (B, C, H, W), float in 0..1, and `label` (B,), int64.
    """

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `logits` (B, classes)."""
        return {"logits": self.model(batch["image"])}

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds `probabilities` (B, classes), 0..1; `prediction` (B,), the most likely class; its `probability` (B,)."""
        probabilities = output["logits"].float().softmax(dim=1)
        probability, prediction = probabilities.max(dim=1)
        return {**output, "probabilities": probabilities, "prediction": prediction, "probability": probability}

    def pictures(self, output: dict[str, Any], batch: dict[str, Tensor], limit: int) -> list[Picture]:
        """Each image with its label and prediction, framed in green if they agree and in red if not."""
        pictures = []
        rows = zip(original(batch)[:limit].cpu(), batch["label"].tolist(), output["prediction"].tolist(), strict=False)
        for image, label, prediction in rows:
            text = f"{label} -> {prediction}"
            pictures.append(labelled(image.permute(1, 2, 0).numpy(), text, ok=label == prediction))
        return pictures
