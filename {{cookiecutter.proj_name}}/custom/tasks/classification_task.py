"""Image classification: connects model, losses, metrics and pictures."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from common.config.registry import TASK_REGISTRY
from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory, class_numbers
from common.task import Picture, Task

_LONGEST_NAME = 24  # characters of a sample's name below its picture


@TASK_REGISTRY.register()
class ClassificationTask(Task):
    """Predicts one of several classes for each image.

    A batch is a dict with `image` (B, C, H, W), float in 0..1, `label` (B,), int64, and if known, `name`, B texts.
    Batches for predictions have no `label`. One that is no class, such as -100, is neither right nor wrong.

    Args:
        top: number of classes that `describe` lists for each image, the most likely ones.
    """

    def __init__(self, model: nn.Module, loss: LossFactory, metric: MetricFactory, top: int = 5) -> None:
        super().__init__(model, loss, metric)
        self.top = top

    def output(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Run the model. Returns `logits` (B, classes)."""
        return {"logits": self.model(batch["image"])}

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Add `probabilities` (B, classes), 0..1; `prediction` (B,), the most likely class; its `probability` (B,)."""
        probabilities = output["logits"].float().softmax(dim=1)
        probability, prediction = probabilities.max(dim=1)
        return {**output, "probabilities": probabilities, "prediction": prediction, "probability": probability}

    def sample_errors(self, output: dict[str, Tensor], batch: dict[str, Any]) -> list[tuple[bool, float, int]]:
        """Whether the prediction is not the label, the cross entropy, and the label: the worst of each are shown."""
        labels = class_numbers(batch["label"], output["logits"])
        losses = cross_entropy(output["logits"].float(), labels, reduction="none", ignore_index=-1)
        wrong = (output["prediction"] != labels) & (labels >= 0)
        return list(zip(wrong.tolist(), losses.tolist(), labels.tolist(), strict=True))

    def describe(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> list[dict[str, Any]]:
        """Return `prediction`, its `class` name, its `probability` and the `top` classes of every image."""
        rows = []
        best = output["probabilities"].topk(min(self.top, output["probabilities"].shape[1]), dim=1)
        for values, numbers in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            top = {self.class_name(number): round(value, 6) for number, value in zip(numbers, values, strict=True)}
            name, probability = next(iter(top.items()))
            rows.append({"prediction": numbers[0], "class": name, "probability": probability, "top": top})
        return rows

    def class_name(self, number: int) -> str:
        """Return the name of a class, or its number if it has no name."""
        return self.classes[number] if number < len(self.classes) else str(number)

    def drawn_name(self, number: int) -> str:
        """Return the name of a class for a picture; its number if the name has other letters than ASCII."""
        name = self.class_name(number)
        return name if name.isascii() else str(number)

    def pictures(self, output: dict[str, Any], batch: dict[str, Any], limit: int) -> list[Picture]:
        """Return images with their label, the prediction if it differs, its probability, and the name of the sample.

        Without labels, the prediction is shown."""
        images = batch["image"][:limit].permute(0, 2, 3, 1).cpu().numpy()
        predictions = output["prediction"].tolist()
        probabilities = output["probability"].tolist()
        known = batch if isinstance(batch, Mapping) else {"label": batch["label"]}
        names = known.get("name") or [""] * len(predictions)
        labels = [-1] * len(predictions)
        if "label" in known:
            labels = class_numbers(known["label"], output["logits"]).tolist()
        pictures = []
        for at, image in enumerate(images):
            is_right = labels[at] == predictions[at] if labels[at] >= 0 else None
            text = f"{self.drawn_name(predictions[at])} ({probabilities[at]:.0%})"
            if is_right is False:
                text = f"{self.drawn_name(labels[at])} -> {text}"
            if len(names[at]) > _LONGEST_NAME:
                text += f"\n...{names[at][3 - _LONGEST_NAME :]}"
            elif names[at]:
                text += f"\n{names[at]}"
            pictures.append(Picture(image, text, is_right))
        return pictures
