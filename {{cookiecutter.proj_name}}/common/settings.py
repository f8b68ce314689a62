"""The engine's settings of a run, composed of sections. Each section is defined next to the code that it configures.

`Config` in the project's own package adds to them, and sets the default task, model and data.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from common.base.parts import rules
from common.checkpoint.saver import CheckpointConfig
from common.checkpoint.weights import InitConfig
from common.config import ConfigError, Problem, extensible_section
from common.config.registry import MODEL_REGISTRY, TASK_REGISTRY, Registered
from common.data.loader import LoaderConfig
from common.data.sections import SplitsConfig, sets_of
from common.distributed import DistConfig
from common.evaluation.best import BestConfig, EarlyStopConfig, Mode, check_metric_names, find_mode
from common.evaluation.loss import LossSections, measured_losses
from common.evaluation.metric import MetricSections
from common.model import PrepareConfig
from common.monitor.monitor import MonitorConfig
from common.optim import OptimConfig
from common.optim.precision import PrecisionConfig
from common.progress import Interval, ProgressConfig
from common.run.paths import DirConfig

TaskSection = Annotated[dict[str, Any], Registered(TASK_REGISTRY)]
ModelSection = Annotated[dict[str, Any], Registered(MODEL_REGISTRY)]
LossSection = Annotated[dict[str, Any] | None, LossSections()]
MetricSection = Annotated[dict[str, Any], MetricSections()]


def default(**values: Any) -> Any:
    """Define the default of a section with free keys: `model: ModelSection = default(type="ConvModel", width=32)`."""
    return field(default_factory=lambda: deepcopy(values))


@extensible_section
class DebugConfig:
    """Debugging aids. `--debug` sets these and more, see configs/debug.yaml."""

    debug_mode: bool = False
    """anomaly detection: the first backward operation with NaN is named"""
    max_samples: Annotated[int, Field(ge=0)] = 0
    """use only the first n samples of each split; 0: all"""


@extensible_section
class RunConfig:
    """All settings that the engine reads."""

    name: Annotated[str, Field(min_length=1)] = "default"
    """name of the run and of its folder"""
    resume: str | None = None
    """checkpoint file, run folder, or auto: this run's newest checkpoint, if any"""
    allow_changes: bool = False
    """with resume: accept changes of keys that affect what is trained"""
    gpu_ids: int | list[int] | Literal["all", "mps"] = -1
    """-1: CPU; one or more GPUs, or all: one process each; mps: the GPU of a Mac"""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """samples per process and forward pass"""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """workers of each loader; 0: read without workers"""
    dir: DirConfig = field(default_factory=DirConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    dataset: SplitsConfig = field(default_factory=SplitsConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    task: TaskSection = field(default_factory=dict)
    """type names a task (see --list); other keys are its arguments"""
    model: ModelSection = field(default_factory=dict)
    """type names a model (see --list); other keys are its arguments"""
    loss: LossSection = field(default_factory=dict)
    """name: {weight, inputs, type (default: the name), arguments}; the weighted sum is minimised"""
    metric: MetricSection = field(default_factory=dict)
    """name: {type (default: the name), arguments}"""
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    progress: ProgressConfig = field(default_factory=ProgressConfig)
    best: BestConfig = field(default_factory=BestConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    init_from: InitConfig = field(default_factory=InitConfig)
    plugins: list[str] = field(default_factory=list)
    """module:function, each called with the trainer before training starts"""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def problems(self) -> Iterator[Problem]:
        """Rules that involve several sections; each section checks its own keys."""
        yield from rules(self)
        yield from check_metric_names(self.metric, self.loss or {})
        if self.dataset.val is None or not Interval.parse(self.progress.epoch_val, "epoch"):
            rule = "needs dataset.val and progress.epoch_val: there is no validation to compare"
            if self.early_stop.patience:
                yield Problem("early_stop.patience", self.early_stop.patience, rule)
            if self.optim.lr_scheduler.type == "plateau":
                yield Problem("optim.lr_scheduler.type", "plateau", rule)
        try:
            self.best_mode  # noqa: B018 - raises
        except ConfigError as error:
            yield from error.problems

    @property
    def best_mode(self) -> Mode:
        """Whether lower or higher values of `best.metric` are better."""
        losses = ["loss", *measured_losses(self.loss)]
        sets = sets_of(self.dataset.val) or [""]
        return find_mode(self.best, losses, self.metric, sets)
