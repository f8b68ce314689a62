"""The interface to your code: a `Task`, and what is `Built` for a run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from common.base.errors import UserError
from common.base.text import label
from common.data.loader import BatchReader, EvaluationLoader, TrainStream, to_device
from common.evaluation.loss import Losses, LossFactory
from common.evaluation.metric import MetricFactory
from common.model import fixed
from common.model.strategy import ModelHolder
from common.monitor.result import Picture
from common.optim.groups import Group
from common.optim.precision import Precision
from common.progress import TaskPosition

__all__ = ["Built", "Group", "Picture", "Task", "TaskPosition", "fixed"]


class Task(ModelHolder, ABC):
    """Connects model, losses, metrics, pictures. Yours are in `custom/tasks`.

    Only `output` must be written. The task owns all trainable and persistent state: the model, losses with weights, a
    teacher, a queue (as a buffer). So it is trained, synchronized between processes, averaged, saved and restored.
    Anything that varies during training should be computed from `at`; then a resume is exact, and nothing has to be
    saved.

    The trainer handles devices, processes, precision, averaged weights and files. A batch is whatever the collate
    function returns: a mapping, tuple or dataclass of tensors, or an object with `to(device)`.

    In checkpoints, patterns and logs, parameters, modules and tensors of the model have the model's own names, without
    `model.`.

    Attributes:
        classes: class names in the order of the labels; empty if the dataset has none.
        own_buffers: names or patterns of the buffers of which each process has its own; see docs/task.md. Models and
            losses may have this attribute too.
        unit: what `count` counts, such as "tokens"; the log says how many of them in a second.
        at: the optimizer steps and epochs done so far, set by the trainer.
    """

    at = TaskPosition()
    classes: Sequence[str] = ()
    own_buffers: ClassVar[Sequence[str]] = ()
    unit: ClassVar[str] = "items"

    def __init__(self, model: nn.Module, loss: LossFactory, metric: MetricFactory) -> None:
        """A subclass may take further keyword arguments: the keys of the config's section `task`."""
        super().__init__()
        self.model = model
        self.loss = loss
        self.metric = metric

    @abstractmethod
    def output(self, batch: Any) -> Any:
        """Run the model on a batch that is on the device already. Returns whatever `losses` and metrics need."""

    def losses(self, output: Any, batch: Any) -> Losses:
        """Compute the losses of a batch, scalar tensors by name: `loss` is minimised, all are logged.

        To log a value of your own: `return {**self.loss(output, batch), "mine": x.mean()}`.
        Every value must be a mean over the samples, or over the items that `count` counts. A value that is not finite
        ends the run, also one that is only logged.
        """
        return self.loss(output, batch)

    def post_process(self, output: Any, batch: Any) -> Any:
        """Convert raw output for metrics and pictures (classes, boxes, ...). Used in evaluation, without gradients."""
        return output

    def pictures(
        self,
        output: Any,
        batch: Any,
        limit: int,
    ) -> list[Picture]:
        """Return up to `limit` pictures of a batch after `post_process`; may be empty.

        Without this method, `parts/pictures` draws the images of a classifier.
        """
        return []

    def sample_errors(
        self,
        output: Any,
        batch: Any,
    ) -> Sequence[tuple[bool, float, Hashable]] | None:
        """Say of each sample whether it is wrong, its loss, and its group; then the worst ones are shown.

        Groups, such as classes, are shown in turn. `pictures` is then called with batches of one sample. Without this
        method, `parts/pictures` does it for the images of a classifier.
        """
        return None

    def prepare_batch(self, batch: Any, device: torch.device) -> Any:
        """Move a loaded batch to the device. Override it for work that is faster there, such as normalising.

        A loaded batch may be prepared several times, so change none of its tensors in place.
        """
        return to_device(batch, device)

    def count(self, batch: Any) -> int | None:
        """Count the items that the losses of a loaded batch average over: words, boxes, pixels. None: samples."""
        return None

    def after_step(self) -> None:
        """Called after every step with no skipped update, to update a teacher or a queue; `at` is where it began."""

    def updates(self) -> Sequence[str]:
        """Name the updates of this step, in order. Every update is an optimizer step on all batches of the step."""
        return ("all",)

    def update(self, name: str, batch: Any) -> Losses:
        """Compute the losses of an update for a batch; `loss` is minimised."""
        return self.losses(self.output(batch), batch)

    def trained_by(self, update: str) -> Iterable[nn.Parameter]:
        """Choose the parameters that an update trains: by default all, or those of the part of the model with its name.

        Raises:
            UserError: the model has no part with that name.
        """
        if update == "all":
            return self.parameters()
        part = dict(self.named_modules()).get(update)
        if part is None:
            kind = type(self).__name__
            raise UserError(f"{kind}.updates: the model has no part called {update}; override {kind}.trained_by")
        return part.parameters()

    def groups(self) -> Iterable[Group]:
        """Parameter groups with their own learning rate or weight decay; the config groups all other parameters."""
        return ()

    def measure(self, batch: Any) -> tuple[Any, Losses]:
        """Run the model on an evaluation batch. Returns its output and its losses."""
        output = self.output(batch)
        return output, self.losses(output, batch)

    def forward(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the task. DDP acts in `forward` alone, so `ddp(task.update, name, batch)` calls it there."""
        return method(*arguments)


@dataclass(frozen=True)
class Built:
    """The objects of a training run. A split without data has no loaders.

    Attributes:
        task: unwrapped, on the CPU; the trainer prepares it, see `common.model`.
        val: the validation sets, which choose the best checkpoint; usually one.
        evaluation: the evaluation sets, for the reported numbers.
    """

    task: Task
    precision: Precision
    stream: TrainStream
    val: Sequence[EvaluationLoader]
    evaluation: Sequence[EvaluationLoader]

    def deciding_data(self) -> dict[str, BatchReader]:
        """Return the data that affect the result, by name: of training, and of validation, which pick the best."""
        data: dict[str, BatchReader] = {"train": self.stream}
        for loader in self.val:
            data[label(loader.split, loader.name)] = loader
        return data
