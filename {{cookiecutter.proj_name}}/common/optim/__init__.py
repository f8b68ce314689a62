"""How weights change: optimizer, learning rate, clipping, precision."""

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from common.base.parts import sections
from common.config import section
from common.optim.clip import Clip, ClipConfig
from common.optim.optimizer import OptimizerConfig, build_optimizer, needs_closure
from common.optim.schedule import LrSchedulerConfig, build_schedule

__all__ = ["Clip", "OptimConfig", "build_optimizer", "build_schedule", "needs_closure"]


@section
class BadStepsConfig:
    """What happens to a step whose loss or gradient is not finite, or a spike: docs/optim.md. All processes agree."""

    action: Annotated[Literal["stop", "skip", "rewind"], Field(description="rewind: skip, from older weights")] = "stop"
    limit: Annotated[int, Field(ge=1, description="steps skipped in a row, before the run stops")] = 3
    spike: Annotated[float | None, Field(gt=0, description="standard deviations above the mean; null: off")] = None

    @property
    def is_active(self) -> bool:
        """Whether steps are judged; if not, only losses are."""
        return self.action != "stop" or self.spike is not None


@section
class OptimConfig(ClipConfig, OptimizerConfig):
    """How weights change. The keys of the optimizer and of clipping are written here, not in sections of their own."""

    own_prefix: ClassVar[str] = ""
    """Prefix of values of the trained weights, where those of an average are measured too."""

    accumulate: Annotated[int, Field(ge=1, description="micro-batches per optimizer step")] = 1
    lr_scheduler: LrSchedulerConfig = field(default_factory=LrSchedulerConfig)
    bad_steps: BadStepsConfig = field(default_factory=BadStepsConfig)

    __renamed__: ClassVar[dict[str, str]] = {
        "type": "optim_type",
        "maxiters": "it is now args.max_iter",
        "beta1": "it is now the first number of args.betas",
        "beta2": "it is now the second number of args.betas",
        "clip_warmup": "a stage sets another limit, as in optim: {clip_gradients: 1}",
        "clip_gradients_warmup": "a stage sets another limit",
        **{key: f"it is now args.{key}" for key in ("momentum", "betas", "eps", "centered")},
    }


if not TYPE_CHECKING:  # to the type checker, the core does not have the keys of parts
    OptimConfig = section(sections(OptimConfig))
