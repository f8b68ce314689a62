"""What this part adds to the configuration: `debug.print_all_grad`."""

from typing import Annotated

from pydantic import Field

from common.config import section

SAFE = ("debug.print_all_grad",)


@section
class DebugConfig:
    """The key that this part adds to the section `debug`."""

    print_all_grad: Annotated[bool, Field(description="with debug_mode: weights and gradients by parameter")] = False
