"""What this part adds to the configuration: `speed`."""

from dataclasses import field
from typing import Annotated

from pydantic import Field

from common.config import section

SAFE = ("speed.*",)


@section
class SpeedConfig:
    """TFLOP/s and MFU, in log lines."""

    count_flops: bool | None = False
    """by a trial pass; also done where the peak is given; null: as false"""
    peak_tflops: Annotated[float | None, Field(gt=0)] = None
    """of a device, by its data sheet; null: no MFU"""


@section
class RunConfig:
    """The key that this part adds to the configuration of a run."""

    speed: SpeedConfig = field(default_factory=SpeedConfig)
