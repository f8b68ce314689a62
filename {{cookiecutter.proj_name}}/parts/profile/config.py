"""What this part adds to the configuration: `profile`."""

from dataclasses import field
from typing import Annotated

from pydantic import Field

from common.config import section


@section
class ProfileConfig:
    """A trace of some training steps, profile.json in the run's folder, and a table of their operators in the log."""

    steps: Annotated[int, Field(ge=0)] = 0
    """optimizer steps to record with torch.profiler; 0: none"""
    wait: Annotated[int, Field(ge=1)] = 10
    """steps to train before that; the first ones are not typical"""


@section
class RunConfig:
    """The key that this part adds to the configuration of a run."""

    profile: ProfileConfig = field(default_factory=ProfileConfig)
