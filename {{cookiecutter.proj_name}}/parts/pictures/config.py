"""What this part adds to the configuration: `pictures`."""

from dataclasses import field
from typing import Annotated

from pydantic import Field

from common.config import section
from common.progress import StepInterval

SAFE = ("pictures.*",)


@section
class PicturesConfig:
    """Pictures of predictions, if the task draws any."""

    every: Annotated[StepInterval, Field(description="between pictures of training data; steps")] = 100
    number: Annotated[int, Field(ge=0, description="pictures each time, of each set; 0: none")] = 8
    files: Annotated[bool, Field(description="also write PNG files, to progress/ in the run folder")] = False


@section
class RunConfig:
    """The key that this part adds to the configuration of a run."""

    pictures: PicturesConfig = field(default_factory=PicturesConfig)
