"""Image classification: connects model, losses, metrics and pictures."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy

from common.config.registry import TASK_REGISTRY
from common.evaluation.gallery import Gallery
from common.monitor.pictures import Picture, labelled
from common.task import Task
from custom.datasets.sample_transform import original
from custom.tasks.worst_first import SampleError, WorstFirst

_LONGEST_NAME = 24  # characters of a sample's name below its picture


@TASK_REGISTRY.register()
class ClassificationTask(Task):
    """Predicts one of several classes for each image.

    A batch is a dict with `image` (B, C, H, W), float in 0..1, `label` (B,), int64, and if known, `name`, B texts.
    """

    gallery: ClassVar[type[Gallery]] = WorstFirst

    def output(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Returns `logits` (B, classes)."""
        return {"logits": self.model(batch["image"])}

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Adds `probabilities` (B, classes), 0..1; `prediction` (B,), the most likely class; its `probability` (B,)."""
        probabilities = output["logits"].float().softmax(dim=1)
        probability, prediction = probabilities.max(dim=1)
        return {**output, "probabilities": probabilities, "prediction": prediction, "probability": probability}

    def sample_errors(self, output: dict[str, Tensor], batch: dict[str, Any]) -> list[SampleError]:
        """Wrong if the most likely class is not the label; the cross entropy; groups are the labels."""
        losses = cross_entropy(output["logits"].float(), batch["label"], reduction="none")
        wrong = output["prediction"] != batch["label"]
        return list(map(SampleError, wrong.tolist(), losses.tolist(), batch["label"].tolist()))

    def pictures(self, output: dict[str, Any], batch: dict[str, Any], limit: int) -> list[Picture]:
        """Each image with its label, the prediction if it is another, the probability of the predicted class, and the
        sample's name; framed in green if the prediction is right and in red if not."""
        pictures = []
        names = (batch.get("name") if isinstance(batch, Mapping) else None) or [""] * limit
        images = original(batch)[:limit].cpu()
        columns = (batch["label"], output["prediction"], output["probability"])
        for image, name, (label, prediction, probability) in zip(
            images, names, zip(*(column[:limit].tolist() for column in columns), strict=True), strict=False
        ):
            ok, shown = label == prediction, self.class_name(label)
            text = f"{shown if ok else f'{shown} -> {self.class_name(prediction)}'} ({probability:.0%})"
            below = f"\n{name if len(name) <= _LONGEST_NAME else '...' + name[3 - _LONGEST_NAME :]}" if name else ""
            pictures.append(labelled(image.permute(1, 2, 0).numpy(), text + below, ok=ok))
        return pictures

    def class_name(self, number: int) -> str:
        """The name of a class; its number if the data set has no names."""
        return self.classes[number] if number < len(self.classes) else str(number)
