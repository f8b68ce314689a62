"""Classification in two stages: the head alone, then everything, the backbone at a lower rate."""

from collections.abc import Iterator

from torch import Tensor

from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from common.task import Group, Task
from examples.stages.model import TwoParts


class StagesTask(Task):
    """The stages are in the config.

    Args:
        backbone: factor of the backbone's learning rate.
    """

    model: TwoParts

    def __init__(self, model: TwoParts, loss: LossFactory, metric: MetricFactory, backbone: float = 0.3) -> None:
        super().__init__(model, loss, metric)
        self.backbone = backbone

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `logits` (B, classes)."""
        return {"logits": self.model(batch["image"])}

    def groups(self) -> Iterator[Group]:
        """Give the backbone a rate of its own; the head has that of the config."""
        yield Group("backbone", list(self.model.backbone.parameters()), lr_mult=self.backbone)
