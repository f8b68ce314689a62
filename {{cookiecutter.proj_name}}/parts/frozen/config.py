"""What this part adds to the configuration: `checkpoint.frozen`."""

from common.config import section


@section
class CheckpointConfig:
    """The key that this part adds to the section `checkpoint`."""

    frozen: bool = True
    """false: omit what is not trained; a resume reloads its source"""
