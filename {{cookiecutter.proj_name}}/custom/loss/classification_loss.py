"""The example loss: cross entropy."""

from collections.abc import Mapping

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

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        name = "soft_label" if isinstance(batch, Mapping) and "soft_label" in batch else "label"
        return self.function(output["logits"], batch[name])
