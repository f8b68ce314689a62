"""What this part adds to the configuration: `optim.ema`."""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from common.config import Problem, section
from common.progress import EpochInterval

OWN = "weights."
"""Prefix of values measured with the raw weights, where both are measured."""


@section
class EmaConfig:
    """Exponential moving average (EMA) of the weights."""

    decay: Annotated[float, Field(ge=0.0, lt=1.0, description="weight of the old average; 0 turns it off")] = 0.0
    warmup: Annotated[bool, Field(description="begin with a decay of (1 + n) / (10 + n) at update n")] = True
    every: Annotated[int, Field(ge=1, description="optimizer steps between updates")] = 1
    start: Annotated[EpochInterval, Field(description='epochs, or "100step"; until then it is the weights')] = 0
    device: Annotated[Literal["cpu"] | None, Field(description="cpu: host memory, slow; null: the weights' own")] = None
    evaluate: Annotated[
        Literal["average", "both"],
        Field(description="both: measure the raw weights too, as in weights.loss; best.metric can name either"),
    ] = "average"

    def problems(self) -> Iterator[Problem]:
        """`evaluate: both` without an EMA."""
        if self.evaluate == "both" and not self.decay:
            yield Problem("evaluate", self.evaluate, "needs a decay above 0", "without an average there is one result")


@section
class OptimConfig:
    """The key that this part adds to the section `optim`."""

    ema: EmaConfig = field(default_factory=EmaConfig)

    @property
    def own_prefix(self) -> str:
        """Prefix of values of the raw weights, where both are measured; "" if only one of them is."""
        return OWN if self.ema.evaluate == "both" else ""
