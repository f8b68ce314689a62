"""Pictures of images that were classified, for tasks that draw none themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from common.evaluation.metric import class_numbers
from common.task import Picture, Task

_LONGEST_NAME = 24  # characters of a sample's name below its picture


def pictures(task: Task, output: Any, batch: Any, limit: int) -> list[Picture]:
    """Return the pictures that a task draws; if it has no such method, those of a classifier."""
    if type(task).pictures is Task.pictures:
        return class_pictures(task.classes, output, batch, limit)
    return task.pictures(output, batch, limit)


def class_pictures(classes: Sequence[str], output: Any, batch: Any, limit: int) -> list[Picture]:
    """Return images with their label, the prediction if it differs, its probability, and the name of the sample.

    Without labels, the prediction is shown.
    """
    known = _labels(output, batch)
    if known is None:
        return []
    images = batch["image"][:limit].permute(0, 2, 3, 1).cpu()
    if images.is_floating_point():
        images = images.float()  # NumPy has no bfloat16
    labels = known.tolist()
    predictions = output["prediction"].tolist()
    probabilities = output["probability"].tolist()
    names = batch.get("name")
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        names = [""] * len(labels)
    drawn = []
    for at, image in enumerate(images.numpy()):
        is_right = labels[at] == predictions[at] if labels[at] >= 0 else None
        text = f"{_drawn_name(classes, predictions[at])} ({probabilities[at]:.0%})"
        if is_right is False:
            text = f"{_drawn_name(classes, labels[at])} -> {text}"
        if len(names[at]) > _LONGEST_NAME:
            text += f"\n...{names[at][3 - _LONGEST_NAME :]}"
        elif names[at]:
            text += f"\n{names[at]}"
        drawn.append(Picture(image, text, is_right))
    return drawn


def class_errors(output: Any, batch: Any) -> list[tuple[bool, float, int]] | None:
    """Whether the prediction is not the label, the cross entropy, and the label: the worst of each are shown."""
    labels = _labels(output, batch)
    if labels is None:
        return None
    losses = cross_entropy(output["logits"].float(), labels, reduction="none", ignore_index=-1)
    wrong = (output["prediction"] != labels) & (labels >= 0)
    return list(zip(wrong.tolist(), losses.tolist(), labels.tolist(), strict=True))


def _labels(output: Any, batch: Any) -> Tensor | None:
    """Return the class of each image, -1 where it is not known; None if no images were classified.

    They were if the batch has `image` (B, 1 or 3 or 4, H, W), and the output `logits` (B, classes), `prediction` (B,)
    and its `probability` (B,).
    """
    if not isinstance(output, Mapping) or not isinstance(batch, Mapping):
        return None
    image: Any = batch.get("image")
    values = [image, output.get("logits"), output.get("prediction"), output.get("probability")]
    if [getattr(value, "ndim", 0) for value in values] != [4, 2, 1, 1] or image.shape[1] not in (1, 3, 4):
        return None
    label = batch.get("label")
    if isinstance(label, Tensor):
        numbers = class_numbers(label, output["logits"])
        if numbers.shape == output["prediction"].shape:
            return numbers
    return torch.full_like(output["prediction"], -1)


def _drawn_name(classes: Sequence[str], number: int) -> str:
    """Return the name of a class; its number if it has none, or one with other letters than ASCII."""
    if number < len(classes) and classes[number].isascii():
        return classes[number]
    return str(number)
