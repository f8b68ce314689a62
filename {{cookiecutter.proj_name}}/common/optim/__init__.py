"""How weights change: optimizer, learning rate, clipping, precision."""

from dataclasses import field
from typing import Annotated

from pydantic import Field

from common.config import extensible_section
from common.optim.clip import Clip, ClipConfig
from common.optim.groups import OptimizerConfig, needs_closure
from common.optim.optimizer import build_optimizer
from common.optim.schedule import LrSchedulerConfig


@extensible_section
class OptimConfig(ClipConfig, OptimizerConfig):
    """How weights change. The keys of the optimizer and of clipping are written here, not in sections of their own."""

    accumulate: Annotated[int, Field(ge=1)] = 1
    """micro-batches per optimizer step"""
    lr_scheduler: LrSchedulerConfig = field(default_factory=LrSchedulerConfig)
