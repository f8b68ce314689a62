"""The whole configuration, composed of the sections that stand beside the code they configure.

A key of your own is a field in a section of your own: write a class with `@section`, give it a field below, and it is
checked, listed in `--help` and settable from YAML and the command line like all others.
"""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from common.checkpoint import CheckpointConfig, InitConfig
from common.config import ConfigError, Problem, section
from common.config.registry import MODEL_REGISTRY, Registered
from common.data.loader import DatasetSection, LoaderConfig
from common.data.sets import EvaluationSection, sets_of
from common.distributed import DistConfig
from common.evaluation.best import BestConfig, EarlyStopConfig, Mode, find_mode
from common.evaluation.loss import LossSections, measured_losses
from common.evaluation.metric import MetricSections, check_names, which_are_better
from common.model import PrepareConfig
from common.monitor import MonitorConfig
from common.optim import OptimConfig
from common.optim.gradients import DebugConfig
from common.optim.precision import PrecisionConfig
from common.progress import ProgressConfig
from common.run.paths import DirConfig
import custom.datasets
import custom.loss
import custom.metric
import custom.models
import custom.schedules  # noqa: F401 - importing the folders fills the registries


@section
class SplitsConfig:
    """The data. `type` names a data set (see --list); but for the loader's `eval_batch_size`, the rest is for it.

    `val` and `eval` may be several data sets by name: `{clean: {type: ...}, shifted: {type: ...}}`.
    """

    train: Annotated[dict[str, Any], DatasetSection(), Field(description="what to learn from")] = field(
        default_factory=lambda: {"type": "DigitsDataset", "shift": 1}
    )
    val: Annotated[
        dict[str, Any] | None,
        EvaluationSection(),
        Field(description="what chooses the best checkpoint; null: none; several as name: {type: ...}"),
    ] = field(default_factory=lambda: {"type": "DigitsDataset", "eval_batch_size": 256})
    eval: Annotated[
        dict[str, Any] | None,
        EvaluationSection(),
        Field(description="what the reported numbers are measured on; null: none; several as name: {type: ...}"),
    ] = field(default_factory=lambda: {"type": "DigitsDataset", "eval_batch_size": 256})


@section
class Config:
    """Everything that a training run is told."""

    __renamed__: ClassVar[dict[str, str]] = {"seed": "dist.random_seed", "lr": "optim.lr", "epochs": "progress.epoch"}

    name: Annotated[str, Field(min_length=1, description="name of the experiment, and of its folder")] = "default"
    resume: Annotated[
        str | None, Field(description="checkpoint file, run folder, or auto: the newest of this run, if it has any")
    ] = None
    allow_changes: Annotated[
        bool, Field(description="with resume: accept changes of keys that alter what is trained")
    ] = False
    gpu_ids: Annotated[
        int | list[int] | Literal["all"],
        Field(description="-1: CPU; otherwise CUDA device(s), or all of them, with one process each"),
    ] = -1
    batch_size: Annotated[int, Field(ge=1, description="samples per process and forward pass")] = 64
    worker: Annotated[int, Field(ge=0, description="processes that read data; 0: the main process does")] = 0
    dir: DirConfig = field(default_factory=DirConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    dataset: SplitsConfig = field(default_factory=SplitsConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    model: Annotated[
        dict[str, Any],
        Registered(MODEL_REGISTRY),
        Field(description="type names a model (see --list), the rest are its arguments"),
    ] = field(
        default_factory=lambda: {"type": "ConvModel", "in_channels": 1, "classes": 10, "width": 32, "dropout": 0.1}
    )
    loss: Annotated[
        dict[str, Any],
        LossSections(),
        Field(description="name: {weight, inputs, type (default: the name), arguments}; the weighted sum is minimised"),
    ] = field(default_factory=lambda: {"CrossEntropyLoss": {"weight": 1.0, "label_smoothing": 0.0}})
    metric: Annotated[
        dict[str, Any], MetricSections(), Field(description="name: {type (default: the name), arguments}")
    ] = field(default_factory=lambda: {"Accuracy": {"k": 1}})
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    progress: ProgressConfig = field(default_factory=ProgressConfig)
    best: BestConfig = field(default_factory=BestConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    init_from: InitConfig = field(default_factory=InitConfig)
    plugins: Annotated[
        list[str], Field(description="module:function each, called with the trainer before training starts")
    ] = field(default_factory=list)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def problems(self) -> Iterator[Problem]:
        """What does not fit together; each section judges its own keys."""
        yield from check_names(self.metric, self.loss)
        if self.early_stop.patience and self.dataset.val is None:
            rule = "needs dataset.val: without validation nothing can be compared"
            yield Problem("early_stop.patience", self.early_stop.patience, rule)
        scheduler = self.optim.lr_scheduler
        try:
            mode = self.best_mode
        except ConfigError as error:
            yield from error.problems
            return
        if scheduler.type == "plateau" and scheduler.mode != mode:
            rule = f"plateau follows best.metric, and the best value of {self.best.metric} is its {mode}"
            yield Problem("optim.lr_scheduler.mode", scheduler.mode, rule, f"set it to {mode}")

    @property
    def best_mode(self) -> Mode:
        """Whether lower or higher values of `best.metric` are better."""
        losses = dict.fromkeys(measured_losses(self.loss), False)
        return find_mode(self.best, {**losses, **which_are_better(self.metric)}, sets_of(self.dataset.val))


@section
class EvalConfig(Config):
    """What `evaluate.py` is told: a training config, and which weights to measure on which split."""

    model_pt: Annotated[str | None, Field(description="checkpoint to evaluate; required")] = None
    split: Annotated[Literal["train", "val", "eval"], Field(description="split to evaluate on")] = "eval"
