"""A step for optimizers whose `step(closure)` computes the loss again, such as LBFGS: docs/parts/closures.md."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.base.errors import UserError
from common.data.loader import Step
from common.distributed import sum_over_ranks
from common.evaluation.loss import Losses
from common.progress import Position
from common.step import OptimizerStep, TaskUpdate, Weights
from common.task import Task


class ClosureStep(OptimizerStep):
    """Gives the optimizer a function that computes the gradients again, and returns the loss.

    Args:
        arguments: those of an `OptimizerStep`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.name = type(self.optimizer).__name__
        if type(self.task).updates is not Task.updates:
            kind = type(self.task).__name__
            raise UserError(
                f"optim.optim_type {self.name} moves all parameters together, and {kind}.updates trains some of them; "
                "choose another optimizer"
            )
        self.with_closure: Any = self.optimizer
        self.optimizer = _StandIn(self.step_with_closure)  # type: ignore[assignment]  # all that a step calls of it
        self.losses_here: list[Tensor] = []  # of the micro-batches of this process, since the last call of the closure

    def gradients(self, update: TaskUpdate, step: Step, weights: Weights, at: Position) -> None:
        """Leave it to the optimizer when, and how often, gradients are computed."""
        self.closure = partial(self.compute, update, step, weights, at)

    def step_with_closure(self) -> None:
        """Call the optimizer, which calls the closure."""
        self.with_closure.step(closure=self.closure)
        self.stay_together(again=False)

    def compute(self, update: TaskUpdate, step: Step, weights: Weights, at: Position) -> Tensor:
        """Compute gradients and the mean loss over all processes: the closure.

        The loss is the same to the last bit on every process, so all of them decide alike in a line search.
        """
        self.stay_together(again=True)
        self.losses_here.clear()
        super().gradients(update, step, weights, at)
        self.meter.discard(at, keep=len(step.batches))  # the log shows the loss that the step began with
        total = torch.zeros(())
        for loss, (weight, _) in zip(self.losses_here, weights, strict=True):
            total = total.to(loss) + loss * weight
        return (sum_over_ranks(total.to("cpu", copy=True), self.rank) / self.rank.world_size).to(total.device)

    def stay_together(self, *, again: bool) -> None:
        """Raise `UserError` if only some processes call the closure `again`: they would wait for the others."""
        calling = int(sum_over_ranks(torch.tensor(int(again)), self.rank))
        if calling not in (0, self.rank.world_size):
            raise UserError(
                f"optim.optim_type {self.name} calls its closure again on {calling} of {self.rank.world_size} "
                "processes: how often it does may depend only on the loss, the gradients and the weights, which are "
                "the same on all"
            )

    def _begin(self, name: str, sample: Callable[[], Any]) -> TaskUpdate:
        update = super()._begin(name, sample)
        forward = update.forward

        def forward_and_keep(name: str, batch: Any) -> Losses:
            losses = forward(name, batch)
            if "loss" in losses:  # else an error follows
                self.losses_here.append(losses["loss"].detach())
            return losses

        update.forward = forward_and_keep
        return update


class _StandIn:
    """Stands in for the optimizer in the core's step: this `step` takes no closure."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step
