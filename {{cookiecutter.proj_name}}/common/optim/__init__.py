"""How weights change: optimizer, learning rate, clipping, weight average, number formats."""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, ClassVar

from pydantic import Field

from common.config import Problem, section
from common.optim.clip import Clip, ClipConfig
from common.optim.ema import Ema, EmaConfig, averaged_state_dict, build_ema
from common.optim.optimizer import OptimizerConfig, build_optimizer, learning_rates, needs_closure, parameter_groups
from common.optim.precision import Precision, PrecisionConfig, build_precision
from common.optim.schedule import LrSchedulerConfig, Schedule, build_schedule

__all__ = [
    "Clip",
    "ClipConfig",
    "Ema",
    "EmaConfig",
    "LrSchedulerConfig",
    "OptimConfig",
    "OptimizerConfig",
    "Precision",
    "PrecisionConfig",
    "Schedule",
    "averaged_state_dict",
    "build_ema",
    "build_optimizer",
    "build_precision",
    "build_schedule",
    "learning_rates",
    "needs_closure",
    "parameter_groups",
]


@section
class OptimConfig(ClipConfig, OptimizerConfig):
    """How weights change. The keys of the optimizer and of clipping are written here, not in sections of their own."""

    accumulate: Annotated[int, Field(ge=1, description="micro-batches per optimizer step")] = 1
    lr_scheduler: Annotated[LrSchedulerConfig, Field(description="how the learning rate changes")] = field(
        default_factory=LrSchedulerConfig
    )
    ema: Annotated[EmaConfig, Field(description="moving average of the weights")] = field(default_factory=EmaConfig)

    __renamed__: ClassVar[dict[str, str]] = {
        "type": "optim_type",
        "maxiters": "it is now args.max_iter",
        "momentum": "it is now args.momentum",
        "use_nesterov": "it is now args.nesterov",
        "beta1": "it is now the first number of args.betas",
        "beta2": "it is now the second number of args.betas",
        "betas": "it is now args.betas",
        "eps": "it is now args.eps",
        "centered": "it is now args.centered",
        "rmsprop_alpha": "it is now args.alpha",
        "accum_grad": "accumulate",
        "clip_grad": "clip_gradients",
    }

    def problems(self) -> Iterator[Problem]:
        """The problems of both parts."""
        yield from OptimizerConfig.problems(self)
        yield from ClipConfig.problems(self)
