"""The example loss."""

from collections.abc import Mapping

from torch import Tensor, nn

from common.config.registry import LOSS_REGISTRY


@LOSS_REGISTRY.register()
class CrossEntropyLoss:
    """Cross entropy of `logits` (B, classes) against `label` (B,), mean over the batch.

    If there is a `soft_label` (B, classes), as of mixed images, it is against that.

    Args:
        label_smoothing: part of the target that is spread over all classes, 0..1.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.function = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        name = "soft_label" if isinstance(batch, Mapping) and "soft_label" in batch else "label"
        return self.function(output["logits"], batch[name])
