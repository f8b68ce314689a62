"""The seat `average` of the training loop: the weights that are evaluated in place of those that are trained."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from common.base.errors import UserError
from common.base.parts import AVERAGE, needs_part
from common.optim.optimizer import parts_of
from common.progress import Position


class Average:
    """The empty seat: the weights themselves are evaluated.

    `update` is called only if `is_active`, after a step that was taken, with the position before it.
    """

    is_active = False

    def follow(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Refuse an optimizer that averages the weights itself, since nothing here would switch it to them."""
        for each in parts_of(optimizer):
            if hasattr(each, "train") and hasattr(each, "eval"):
                kind = type(each).__name__
                raise UserError(f"optim.optim_type: {kind} averages the weights, which {needs_part(AVERAGE)}")

    def update(self, model: nn.Module, at: Position) -> None:
        """Nothing is averaged."""

    def applied(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights to evaluate: its own."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is restored; `Trainer.restore` has refused the state of an average."""
