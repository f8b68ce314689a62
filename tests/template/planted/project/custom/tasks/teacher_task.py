"""Classification with a teacher: the moving average of the weights."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from common.config.registry import TASK_REGISTRY
from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from common.task import fixed
from custom.tasks.classification_task import ClassificationTask


@TASK_REGISTRY.register()
class TeacherTask(ClassificationTask):
    """The logits also follow those of the teacher, by a weight that rises to `share` in the first `rise` steps."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFactory,
        metric: MetricFactory,
        decay: float = 0.9,
        share: float = 0.5,
        rise: int = 30,
    ) -> None:
        super().__init__(model, loss, metric)
        self.decay, self.share, self.rise = decay, share, rise
        self.teacher = fixed(copy.deepcopy(model))

    def losses(self, output: dict[str, Tensor], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Add `follow`, the squared distance to the teacher's logits, to the losses of the config."""
        losses = super().losses(output, batch)
        with torch.no_grad():
            wanted = self.teacher(batch["image"])
        follow = mse_loss(output["logits"], wanted)
        weight = self.share * min(1.0, self.at.step / self.rise)
        return {**losses, "loss": losses["loss"] + weight * follow, "follow": follow}

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the teacher towards the weights."""
        for mine, theirs in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            mine.lerp_(theirs, 1 - self.decay)
