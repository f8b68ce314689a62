"""What the trainer asks of your task. Yours is in `custom/task.py`."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from common.data.move import to_device
from common.evaluation.loss import Losses, LossFactory
from common.evaluation.metric import MetricFactory
from common.monitor.pictures import Picture


class Task(ABC):
    """How model, losses, metrics and pictures meet.

    Devices, processes, precision, averaging of weights and files are the trainer's business, not the task's. A batch is
    whatever the collate function made: a mapping, tuple or dataclass of tensors, or an object with `to(device)`.
    """

    def __init__(self, loss: LossFactory, metric: MetricFactory) -> None:
        self.loss = loss
        self.metric = metric

    @abstractmethod
    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Run the model on a batch. In training `model` may be wrapped (DDP): call it, do not reach into it."""

    @abstractmethod
    def post_process(self, output: Any, batch: Any) -> Any:
        """Turn raw output into what metrics and pictures read (classes, boxes, ...). Evaluation only, no gradient."""

    @abstractmethod
    def pictures(self, output: Any, batch: Any, limit: int) -> list[Picture]:
        """Up to `limit` pictures of a batch after `post_process`; an empty list where there is nothing to see."""

    def prepare_batch(self, batch: Any, device: torch.device) -> Any:
        """Bring a loaded batch to the device. The place for work that is faster there, such as normalising."""
        return to_device(batch, device)

    def losses(self, output: Any, batch: Any) -> Losses:
        """The losses of a batch, see `common.evaluation.loss.LossFactory`."""
        return self.loss(output, batch)
