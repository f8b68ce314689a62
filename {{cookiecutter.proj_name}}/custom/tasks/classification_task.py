"""Image classification: connects model, losses, metrics and pictures."""

from typing import Any

from torch import Tensor, nn

from common.config.registry import TASK_REGISTRY
from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from common.monitor.pictures import Picture, labelled
from common.task import Task
from custom.datasets.sample_transform import original


@TASK_REGISTRY.register()
class ClassificationTask(Task):
    """Predicts one of several classes for each image.

    A batch is a dict with `image` (B, C, H, W), float in 0..1, and `label` (B,), int64; for predictions without it.

    Args:
        top: number of classes that `describe` lists for each image, the most likely ones.
    """

    def __init__(self, model: nn.Module, loss: LossFactory, metric: MetricFactory, top: int = 5) -> None:
        super().__init__(model, loss, metric)
        self.top = top

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `logits` (B, classes)."""
        return {"logits": self.model(batch["image"])}

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds `probabilities` (B, classes), 0..1; `prediction` (B,), the most likely class; its `probability` (B,)."""
        probabilities = output["logits"].float().softmax(dim=1)
        probability, prediction = probabilities.max(dim=1)
        return {**output, "probabilities": probabilities, "prediction": prediction, "probability": probability}

    def describe(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> list[dict[str, Any]]:
        """For each image its `prediction`, the `class` of that number, its `probability`, and the `top` classes."""
        rows = []
        best = output["probabilities"].topk(min(self.top, output["probabilities"].shape[1]), dim=1)
        for values, numbers in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            top = {self.class_name(number): round(value, 6) for number, value in zip(numbers, values, strict=True)}
            name, probability = next(iter(top.items()))
            rows.append({"prediction": numbers[0], "class": name, "probability": probability, "top": top})
        return rows

    def class_name(self, number: int) -> str:
        """The name of a class, or its number if it has none."""
        return self.classes[number] if number < len(self.classes) else str(number)

    def pictures(self, output: dict[str, Any], batch: dict[str, Tensor], limit: int) -> list[Picture]:
        """Each image with its label and prediction, framed in green if they agree and in red if not.

        Without labels, each image with the class predicted and its probability.
        """
        images = original(batch)[:limit].permute(0, 2, 3, 1).cpu().numpy()
        predictions = output["prediction"].tolist()
        if "label" not in batch:
            rows = zip(images, predictions, output["probability"].tolist(), strict=False)
            return [labelled(image, f"{self.class_name(number)} {value:.0%}") for image, number, value in rows]
        return [
            labelled(image, f"{label} -> {prediction}", ok=label == prediction)
            for image, label, prediction in zip(images, batch["label"].tolist(), predictions, strict=False)
        ]
