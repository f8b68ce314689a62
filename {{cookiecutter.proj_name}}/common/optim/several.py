"""Several optimizers as one, each for the parameters of its groups."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch.optim import Optimizer


class Several(Optimizer):
    """Steps each of `parts`. They work on its `state` and its `param_groups`, so it is saved and scheduled as one."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        groups = []
        for part in parts:
            groups += part.param_groups
        super().__init__(groups, {})
        for part in parts:
            self.state.update(part.state)  # some have a state before their first step
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give each part its share, also of what was loaded."""
        super().__setstate__(state)
        rest = iter(self.param_groups)
        for part in self.parts:
            groups = list(islice(rest, len(part.param_groups)))
            part.__setstate__({"state": self.state, "param_groups": groups})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns no loss
        """Step the parts that have gradients: an update of the task may train only some."""
        assert closure is None
        for part in self.parts:
            if any(parameter.grad is not None for group in part.param_groups for parameter in group["params"]):
                part.step()


def parts_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return the optimizers that `optimizer` consists of: often just itself."""
    return optimizer.parts if isinstance(optimizer, Several) else [optimizer]
