"""Distillation (Hinton et al. 2015): the student learns the labels, and what the teacher says about each image."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.base.errors import error_context
from common.checkpoint.file import read_checkpoint
from common.checkpoint.weights import averaged_state_dict, load_weights
from common.config.registry import MODEL_REGISTRY
from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from common.task import Task, fixed

PROJECT = Path(__file__).resolve().parents[2]


class DistillationTask(Task):
    """The loss is a mean of the config's loss and the distance to the teacher, weighted by 1 - `share` and `share`.

    Args:
        teacher: section of the teacher's model, as in `model`.
        weights: checkpoint with the teacher's weights; a relative path starts at the project's folder. In a Slurm job,
            whose code is a copy, that is the working folder.
        temperature: both outputs are divided by it, so that unlikely classes count too.
        share: weight of the distance to the teacher, 0..1.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFactory,
        metric: MetricFactory,
        teacher: dict[str, Any],
        weights: str,
        temperature: float = 3.0,
        share: float = 0.7,
    ) -> None:
        super().__init__(model, loss, metric)
        trained = MODEL_REGISTRY.build(teacher)
        file = PROJECT / weights
        if not file.exists():
            file = Path(weights)
        with error_context("in loading task.weights; the first lines of the config say how to train a teacher"):
            state = read_checkpoint(file)
        load_weights(trained, averaged_state_dict(state["model"], state), weights)
        self.teacher = fixed(trained)
        self.temperature, self.share = temperature, share

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `logits` (B, classes)."""
        return {"logits": self.model(batch["image"])}

    def losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds `teacher`, the Kullback-Leibler divergence at the temperature T, times T squared."""
        losses = super().losses(output, batch)
        with torch.no_grad():
            expected = (self.teacher(batch["image"]) / self.temperature).log_softmax(dim=1)
        student = (output["logits"] / self.temperature).log_softmax(dim=1)
        distance = F.kl_div(student, expected, log_target=True, reduction="batchmean") * self.temperature**2
        return {**losses, "loss": (1 - self.share) * losses["loss"] + self.share * distance, "teacher": distance}
