"""How weights change: optimizer, learning rate, clipping, weight average, number formats."""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, ClassVar

from pydantic import Field

from common.config import Problem, section
from common.optim.clip import Clip, ClipConfig
from common.optim.ema import Ema, EmaConfig, averaged_state_dict
from common.optim.optimizer import OptimizerConfig, build_optimizer, needs_closure
from common.optim.schedule import LrSchedulerConfig, build_schedule

__all__ = ["Clip", "Ema", "OptimConfig", "averaged_state_dict", "build_optimizer", "build_schedule", "needs_closure"]


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
        "beta1": "it is now the first number of args.betas",
        "beta2": "it is now the second number of args.betas",
        **{key: f"it is now args.{key}" for key in ("momentum", "betas", "eps", "centered")},
    }

    def problems(self) -> Iterator[Problem]:
        """The problems of both parts."""
        yield from OptimizerConfig.problems(self)
        yield from ClipConfig.problems(self)
