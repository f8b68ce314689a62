"""Classification in two stages: the head alone, then everything, the backbone at a lower rate."""

from collections.abc import Iterator

from torch import Tensor

from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from common.task import Group, Task
from examples.stages.model import TwoParts


class StagesTask(Task):
    """The stage is a function of the epoch, so a resumed run is always in the right one.

    Args:
        head_epochs: epochs in which only the head is trained.
        backbone: factor of the backbone's learning rate from then on.
    """

    model: TwoParts

    def __init__(
        self, model: TwoParts, loss: LossFactory, metric: MetricFactory, head_epochs: int = 3, backbone: float = 0.3
    ) -> None:
        super().__init__(model, loss, metric)
        self.head_epochs, self.backbone = head_epochs, backbone

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `logits` (B, classes)."""
        return {"logits": self.model(batch["image"])}

    def groups(self) -> Iterator[Group]:
        """Give the backbone a rate of its own; the head has that of the config."""
        yield Group("backbone", list(self.model.backbone.parameters()))

    def rate(self, group: str) -> float:
        """Freeze a group by the rate 0: no decay, no moments."""
        if group != "backbone":
            return 1.0
        return 0.0 if self.at.epoch < self.head_epochs else self.backbone
