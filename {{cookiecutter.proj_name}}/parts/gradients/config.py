"""What this part adds to the configuration: `debug.print_all_grad`."""

from common.config import section

SAFE = ("debug.print_all_grad",)


@section
class DebugConfig:
    """The key that this part adds to the section `debug`."""

    print_all_grad: bool = False
    """with debug_mode: weights and gradients by parameter"""
