"""What this part adds to the configuration: `optim.ema`."""

from dataclasses import field
from typing import Annotated

from pydantic import Field

from common.config import section
from common.progress import EpochInterval


@section
class EmaConfig:
    """Exponential moving average (EMA) of the weights."""

    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """weight of the old average; 0 turns it off"""
    warmup: bool = True
    """begin with a decay of (1 + n) / (10 + n) at update n"""
    every: Annotated[int, Field(ge=1)] = 1
    """optimizer steps between updates"""
    start: EpochInterval = 0
    """epochs, or "100step"; until then it is the weights"""


@section
class OptimConfig:
    """The key that this part adds to the section `optim`."""

    ema: EmaConfig = field(default_factory=EmaConfig)
