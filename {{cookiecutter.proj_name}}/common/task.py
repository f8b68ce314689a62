"""The interface to your code: a `Task`, the built `Parts` of a run, and the config keys that the engine reads."""

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
    """Connects model, losses, metrics and pictures. Yours is in `custom/task.py`.

    The trainer handles devices, processes, precision, averaged weights and files. A batch is whatever the collate
    function returns: a mapping, tuple or dataclass of tensors, or an object with `to(device)`.
    """

    def __init__(self, loss: LossFactory, metric: MetricFactory) -> None:
        self.loss = loss
        self.metric = metric

    @abstractmethod
    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Run the model on a batch. `model` may be wrapped (DDP): call it, do not access its attributes or methods."""

    @abstractmethod
    def post_process(self, output: Any, batch: Any) -> Any:
        """Convert raw output for metrics and pictures (classes, boxes, ...). Used in evaluation, without gradients."""

    @abstractmethod
    def pictures(self, output: Any, batch: Any, limit: int) -> list[Picture]:
        """Up to `limit` pictures of a batch after `post_process`; may be empty."""

    def prepare_batch(self, batch: Any, device: torch.device) -> Any:
        """Move a loaded batch to the device. Override it for work that is faster there, such as normalising."""
        return to_device(batch, device)

    def losses(self, output: Any, batch: Any) -> Losses:
        """The losses of a batch: `sum` is minimised, each entry in `names` is logged. Add values of your own here."""
        return self.loss(output, batch)


@dataclass(frozen=True)
class Parts:
    """The objects of a training run. A split without data has no loaders.

    Attributes:
        model: unwrapped, on the CPU; the trainer prepares it, see `common.model`.
        val: the validation sets, which choose the best checkpoint; usually one.
        evaluation: the evaluation sets, for the reported numbers.
    """

    model: nn.Module
    task: Task
    precision: Precision
    stream: BatchStream
    val: Sequence[EvaluationLoader]
    evaluation: Sequence[EvaluationLoader]


class EngineConfig(Protocol):
    """The config keys that the engine reads; `custom/config.py` defines them, with their defaults."""

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
