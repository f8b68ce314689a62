"""The example loss: cross entropy."""

from collections.abc import Mapping
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn

from common.config.registry import LOSS_REGISTRY


@LOSS_REGISTRY.register()
class CrossEntropyLoss:
    """Cross entropy of `logits` (B, classes) against `label` (B,), mean over the batch. For masks, all have more
    dimensions; where labels are ignored, the task should count the others: see docs/evaluation.md.

    If the batch has a `soft_label` (B, classes), as for mixed images, that is the target.

    Args:
        label_smoothing: share of the target that is spread over all classes, 0..1.
        ignore_index: a label that is left out.
    """

    def __init__(self, label_smoothing: float = 0.0, ignore_index: int = -100) -> None:
        self.function = nn.CrossEntropyLoss(label_smoothing=label_smoothing, ignore_index=ignore_index)
        self.is_checked = False

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        if not self.is_checked:  # once: it waits for the device
            self.is_checked = True
            warn_of_probabilities(output["logits"])
        name = "soft_label" if isinstance(batch, Mapping) and "soft_label" in batch else "label"
        return self.function(output["logits"], batch[name])


def warn_of_probabilities(logits: Any) -> None:
    """Warn if `logits` (B, classes) are probabilities: this loss applies softmax, so the model must not."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        return
    sums = logits.detach().float().sum(1)
    if logits.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=0.01):
        logger.warning(
            "CrossEntropyLoss: `logits` are probabilities already (each row sums to 1), but this loss applies softmax "
            "itself: training would be slow and stop early. Remove the softmax at the end of the model"
        )
