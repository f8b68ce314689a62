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

    every: StepInterval = 100
    """between pictures of training data; steps"""
    number: Annotated[int, Field(ge=0)] = 8
    """pictures each time, of each set; 0: none"""
    files: bool = False
    """also write PNG files, to progress/ in the run folder"""


@section
class RunConfig:
    """The key that this part adds to the configuration of a run."""

    pictures: PicturesConfig = field(default_factory=PicturesConfig)
