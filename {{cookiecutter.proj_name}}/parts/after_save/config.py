"""What this part adds to the configuration: `checkpoint.after_save`."""

from dataclasses import field
from typing import Annotated, Any

from common.config import section
from common.config.registry import AFTER_SAVE_REGISTRY, Registered


@section
class CheckpointConfig:
    """The key that this part adds to the section `checkpoint`."""

    after_save: Annotated[list[str | dict[str, Any]], Registered(AFTER_SAVE_REGISTRY)] = field(default_factory=list)
    """functions called with each saved file, in the background: uploads"""
