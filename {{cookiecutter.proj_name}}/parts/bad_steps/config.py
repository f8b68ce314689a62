"""What this part adds to the configuration: `optim.bad_steps`."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from common.config import section

SAFE = ("optim.bad_steps.action", "optim.bad_steps.limit")
"""Keys of which a resume accepts new values."""


@section
class BadStepsConfig:
    """What happens to a step whose loss or gradient is not finite, or a spike. All processes agree."""

    action: Literal["stop", "skip", "rewind"] = "stop"
    """rewind: skip, from older weights"""
    limit: Annotated[int, Field(ge=1)] = 3
    """steps skipped in a row, before the run stops"""
    spike: Annotated[float | None, Field(gt=0)] = None
    """standard deviations above the mean; null: off"""

    @property
    def is_active(self) -> bool:
        """Whether steps are judged; if not, only losses are."""
        return self.action != "stop" or self.spike is not None


@section
class OptimConfig:
    """The key that this part adds to the section `optim`."""

    bad_steps: BadStepsConfig = field(default_factory=BadStepsConfig)
