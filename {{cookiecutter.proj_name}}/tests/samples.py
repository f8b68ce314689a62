"""A dataset, a model, a loss, a metric and a task for the tests: the project's own are there to be changed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from common.evaluation.metric import Metric
from common.task import Task


class Digits:
    """Small images of digits, as `custom/` has them at first; shifted by up to `shift` pixels."""

    classes = tuple("0123456789")

    def __init__(self, data_dir: Path, mode: str, shift: int = 0) -> None:
        with np.load(Path(__file__).with_name("digits.npz")) as data:
            chosen = data["split"] == ("train", "val", "eval").index(mode)
            self.numbers = np.flatnonzero(chosen)
            self.images = torch.from_numpy(data["images"][chosen]).float().div_(16).unsqueeze_(1)
            self.labels = torch.from_numpy(data["labels"][chosen]).long()
        self.shift = shift
        self.random = shift > 0

    def __len__(self) -> int:
        return len(self.labels)

    def sample_ids(self) -> list[tuple[str, int]]:
        return [("digits", int(number)) for number in self.numbers]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self.images[index]
        if self.shift:
            moves = torch.randint(-self.shift, self.shift + 1, (2,)).tolist()
            image = torch.roll(image, moves, dims=(1, 2))
        return {"image": image, "label": self.labels[index]}


class Convolution(nn.Module):
    """Batch norm, and dropout of the last layer's input."""

    def __init__(self, in_channels: int = 1, classes: int = 10, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _stage(in_channels, width),
            _stage(width, width),
            nn.MaxPool2d(2, ceil_mode=True),
            _stage(width, 2 * width),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(8 * width, classes))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.features(image))


def _stage(channels: int, width: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


class CrossEntropy:
    """Of `logits` against `label`, or `soft_label` if there is one."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.function = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return self.function(
            output["logits"], batch["soft_label" if isinstance(batch, Mapping) and "soft_label" in batch else "label"]
        )


class Share(Metric):
    """The share of samples whose label is among the `k` most likely classes."""

    higher_is_better = True

    def __init__(self, k: int = 1) -> None:
        self.k, self.correct, self.count = k, 0, 0

    def update(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
        top = output["logits"].topk(self.k, dim=1).indices
        self.correct += int((top == batch["label"][:, None]).sum())
        self.count += len(top)

    def merge(self, other: Self) -> None:
        self.correct += other.correct
        self.count += other.count

    def compute(self) -> float:
        return self.correct / self.count


class Classification(Task):
    """Logits of images, the probabilities, and the most likely class."""

    def output(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"logits": self.model(batch["image"])}

    def post_process(self, output: dict[str, Tensor], batch: dict[str, Any]) -> dict[str, Tensor]:
        probabilities = output["logits"].float().softmax(dim=1)
        probability, prediction = probabilities.max(dim=1)
        return {**output, "probabilities": probabilities, "prediction": prediction, "probability": probability}
