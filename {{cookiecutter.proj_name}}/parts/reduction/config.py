"""What this part adds to the configuration: `dist.reduction`."""

from typing import Literal

from common.config import section


@section
class DistConfig:
    """The key that this part adds to the section `dist`."""

    reduction: Literal["default", "fixed"] = "default"
    """fixed: the same bits on 1, 2, 4, 8 processes; optim.accumulate then counts those of all"""

    @property
    def is_fixed(self) -> bool:
        """Whether gradients are summed in an order that does not depend on the number of processes."""
        return self.reduction == "fixed"
