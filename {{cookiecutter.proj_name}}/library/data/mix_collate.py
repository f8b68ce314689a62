"""Batches of mixed images, for training: mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899).

loader: {collate: {type: mixup, alpha: 0.2}}
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from common.base.errors import UserError
from common.config.registry import COLLATE_REGISTRY
from common.data.keyed import find_collate
from common.data.view import kind_of


class _Mix(ABC):
    """Mixes the images of a batch in pairs, with a share drawn from Beta(alpha, alpha), the same for the whole batch.

    `label` (B,) stays the label of the image with the larger share. `soft_label` (B, classes), float, has the shares
    of both; the example `CrossEntropyLoss` trains on it where it is there. Evaluation has none.

    Args:
        dataset: supplied by the program. Its samples have `image` (C, H, W), all of one size, and `label`.
        alpha: strength, more than 0. Near 0, most batches are hardly mixed; 1: every share is equally likely.
        classes: number of classes; by default that of the dataset's `classes`.
    """

    training_only = True
    random = True

    def __init__(self, dataset: Any, alpha: float = 0.2, classes: int | None = None) -> None:
        names = getattr(dataset, "classes", ())
        if not alpha > 0:
            raise UserError(f"loader.collate.alpha: is {alpha}, must be more than 0")
        if not (classes or names):
            raise UserError(f"loader.collate: {kind_of(dataset)} has no `classes`; give their number, classes: 10")
        self.alpha = alpha
        self.classes = classes or len(names)
        self.collate = find_collate(dataset, None)

    def __call__(self, items: list[Any]) -> dict[str, Any]:
        batch = self.collate(items)
        image = batch["image"]
        label = batch["label"]
        order = torch.randperm(len(label))
        mixed, share = self.mix(image, image[order], float(np.random.beta(self.alpha, self.alpha)))
        if not 0 <= int(label.min()) <= int(label.max()) < self.classes:
            raise UserError(
                f"loader.collate: labels must be from 0 to {self.classes - 1} to be mixed, not {label.tolist()}"
            )
        first = one_hot(label, self.classes).float()
        second = one_hot(label[order], self.classes).float()
        if share < 0.5:
            label = label[order]
        return {**batch, "image": mixed, "label": label, "soft_label": share * first + (1 - share) * second}

    @abstractmethod
    def mix(self, first: Tensor, second: Tensor, share: float) -> tuple[Tensor, float]:
        """Return the mixed images, and the actual share of `first` in them, which should be near `share`."""


@COLLATE_REGISTRY.register("mixup")
class Mixup(_Mix):
    """Blends two images."""

    def mix(self, first: Tensor, second: Tensor, share: float) -> tuple[Tensor, float]:
        return share * first + (1 - share) * second, share


@COLLATE_REGISTRY.register("cutmix")
class CutMix(_Mix):
    """Puts a rectangle of one image into the other; it has the same proportions, and may reach over the edge."""

    def mix(self, first: Tensor, second: Tensor, share: float) -> tuple[Tensor, float]:
        height, width = first.shape[-2:]
        half = 0.5 * (1 - share) ** 0.5
        y, x = np.random.rand(2)
        top = round(max(y - half, 0.0) * height)
        bottom = round(min(y + half, 1.0) * height)
        left = round(max(x - half, 0.0) * width)
        right = round(min(x + half, 1.0) * width)
        mixed = first.clone()
        mixed[..., top:bottom, left:right] = second[..., top:bottom, left:right]
        return mixed, 1 - (bottom - top) * (right - left) / (height * width)
