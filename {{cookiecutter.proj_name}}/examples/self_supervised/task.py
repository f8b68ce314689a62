"""Self-distillation: a student agrees on another view of an image with a teacher, its own slow average."""

import copy
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize

from common.evaluation.loss import Losses, LossFactory
from common.evaluation.metric import MetricFactory
from common.task import Task, fixed
from examples.self_supervised.model import Student


class DinoTask(Task):
    """Learns features of images without labels (DINO; Caron et al. 2021).

    The teacher's outputs are centred on their running mean, else all images would end in one group; a low temperature
    keeps them from all being undecided. A batch is a dict with `image`, `first` and `second` (B, 1, H, W), float: an
    image and two views of it.

    Args:
        momentum: weight of the old teacher in the new one at the first step, 0..1; it rises to 1.
        centre_momentum: weight of the old centre in the new one, 0..1.
        temperatures: of the softmax of the student, and of the teacher.
    """

    own_buffers = ("step_sum",)
    model: Student
    centre: Tensor
    step_sum: Tensor

    def __init__(
        self,
        model: Student,
        loss: LossFactory,
        metric: MetricFactory,
        momentum: float = 0.98,
        centre_momentum: float = 0.9,
        temperatures: tuple[float, float] = (0.1, 0.02),
    ) -> None:
        super().__init__(model, loss, metric)
        self.momentum, self.centre_momentum, self.temperatures = momentum, centre_momentum, temperatures
        self.teacher = fixed(copy.deepcopy(model))
        self.register_buffer("centre", torch.zeros(model.groups))
        # The sum of this step's outputs, and their number.
        self.register_buffer("step_sum", torch.zeros(model.groups + 1), persistent=False)

    def update(self, name: str, batch: dict[str, Tensor]) -> Losses:
        """Cross entropy between the teacher's groups for one view and the student's for the other, both ways round."""
        views = torch.cat([batch["first"], batch["second"]])
        with torch.no_grad():
            logits = self.teacher(views)
            self.step_sum += torch.cat([logits.sum(dim=0), logits.new_full((1,), len(logits))])
            wanted = ((logits - self.centre) / self.temperatures[1]).softmax(dim=1)
        student = (self.model(views) / self.temperatures[0]).log_softmax(dim=1)
        return {"loss": -(wanted.roll(len(views) // 2, dims=0) * student).sum(dim=1).mean()}

    @torch.no_grad()
    def after_step(self) -> None:
        """Teacher and centre follow. The momentum is a function of the step, so a resumed run continues as it was."""
        if dist.is_initialized():
            dist.all_reduce(self.step_sum)
        self.centre.lerp_(self.step_sum[:-1] / self.step_sum[-1], 1 - self.centre_momentum)
        self.step_sum.zero_()
        progress = self.at.step / (self.at.total or math.inf)
        momentum = 1 - (1 - self.momentum) * (1 + math.cos(math.pi * progress)) / 2
        for old, new in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            old.lerp_(new, 1 - momentum)
        for kept, now in zip(self.teacher.buffers(), self.model.buffers(), strict=True):
            kept.copy_(now)  # statistics of batch norms, if the model has any

    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns `embedding` (B, features), of length 1, of the unchanged images."""
        return {"embedding": normalize(self.model.encoder(batch["image"]))}

    def losses(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Losses:
        """None in evaluation."""
        return {}
