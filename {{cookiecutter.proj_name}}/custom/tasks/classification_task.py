"""Image classification: connects model, losses and metrics."""

from typing import Any

from torch import Tensor

from common.config.registry import TASK_REGISTRY
from common.task import Task


@TASK_REGISTRY.register()
class ClassificationTask(Task):
    """Predicts one of several classes for each image.

    A batch is a dict with `image` (B, C, H, W), float in 0..1, `label` (B,), int64, and if known, `name`, B texts.
    Batches for predictions have no `label`. A label that is no class, such as -100, is neither right nor wrong.
    """

    def output(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Run the model. Returns `logits` (B, classes)."""
        return {"logits": self.model(batch["image"])}

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Add `probabilities` (B, classes), 0..1; `prediction` (B,), the most likely class; its `probability` (B,)."""
        probabilities = output["logits"].float().softmax(dim=1)
        probability, prediction = probabilities.max(dim=1)
        return {**output, "probabilities": probabilities, "prediction": prediction, "probability": probability}
