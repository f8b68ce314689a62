"""What this part adds to the configuration: `dist.reduction`."""

from typing import Annotated, Literal

from pydantic import Field

from common.config import section


@section
class DistConfig:
    """The key that this part adds to the section `dist`."""

    reduction: Annotated[
        Literal["default", "fixed"],
        Field(description="fixed: the same bits on 1, 2, 4, 8 processes; optim.accumulate then counts those of all"),
    ] = "default"

    @property
    def is_fixed(self) -> bool:
        """Whether gradients are summed in an order that does not depend on the number of processes."""
        return self.reduction == "fixed"
