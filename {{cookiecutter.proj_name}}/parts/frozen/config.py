"""What this part adds to the configuration: `checkpoint.frozen`."""

from typing import Annotated

from pydantic import Field

from common.config import section


@section
class CheckpointConfig:
    """The key that this part adds to the section `checkpoint`."""

    frozen: Annotated[bool, Field(description="false: omit what is not trained; a resume reloads its source")] = True
