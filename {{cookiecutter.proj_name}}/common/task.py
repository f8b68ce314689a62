"""What the engine asks of your code: a `Task`, the built `Parts` of a run, and the keys of the config that it reads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from common.checkpoint import CheckpointConfig, InitConfig
from common.data.loader import BatchStream, EvaluationLoader
from common.data.move import to_device
from common.distributed import DistConfig
from common.evaluation.best import BestConfig, EarlyStopConfig, Mode
from common.evaluation.loss import Losses, LossFactory
from common.evaluation.metric import MetricFactory
from common.model import PrepareConfig
from common.monitor import MonitorConfig
from common.monitor.pictures import Picture
from common.optim import OptimConfig
from common.optim.gradients import DebugConfig
from common.optim.precision import Precision
from common.progress import ProgressConfig
from common.run.paths import DirConfig


class Task(ABC):
    """How model, losses, metrics and pictures meet. Yours is in `custom/task.py`.

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


@dataclass(frozen=True)
class Parts:
    """What is trained, on what. Of a split without data there are no loaders.

    Attributes:
        model: bare, on the CPU; the trainer prepares it, see `common.model`.
        val: the sets for choosing the best checkpoint; mostly one.
        evaluation: the sets for the reported numbers.
    """

    model: nn.Module
    task: Task
    precision: Precision
    stream: BatchStream
    val: Sequence[EvaluationLoader]
    evaluation: Sequence[EvaluationLoader]


class EngineConfig(Protocol):
    """The keys of the config that the engine itself reads; `custom/config.py` has them, with their defaults."""

    @property
    def name(self) -> str: ...

    @property
    def resume(self) -> str | None: ...

    @property
    def allow_changes(self) -> bool: ...

    @property
    def gpu_ids(self) -> int | list[int] | Literal["all"]: ...

    @property
    def worker(self) -> int: ...

    @property
    def dir(self) -> DirConfig: ...

    @property
    def dist(self) -> DistConfig: ...

    @property
    def debug(self) -> DebugConfig: ...

    @property
    def optim(self) -> OptimConfig: ...

    @property
    def prepare(self) -> PrepareConfig: ...

    @property
    def progress(self) -> ProgressConfig: ...

    @property
    def best(self) -> BestConfig: ...

    @property
    def best_mode(self) -> Mode: ...

    @property
    def early_stop(self) -> EarlyStopConfig: ...

    @property
    def checkpoint(self) -> CheckpointConfig: ...

    @property
    def init_from(self) -> InitConfig: ...

    @property
    def monitor(self) -> MonitorConfig: ...

    @property
    def plugins(self) -> list[str]: ...
