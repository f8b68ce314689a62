"""One optimizer step of a task: forward, loss, backward, clip, step."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.base.errors import UserError
from common.data.loader import Step
from common.distributed import Rank, SharedBuffers, sum_over_ranks
from common.distributed.buffers import buffers_unchanged
from common.evaluation.loss import Losses
from common.model import Strategy
from common.model.freeze import warn_of_unused
from common.model.warm_up import warm_up_ddp
from common.monitor.meter import Meter
from common.optim import Clip, needs_closure
from common.optim.groups import group_name
from common.progress import Position
from common.task import Task

_NO_COUNT = "{kind}.count returned None for a batch of rank {rank}; a task with this method must always return a number"
_NOTHING = nullcontext()


@dataclass(frozen=True)
class Update:
    """One of the task's updates.

    Attributes:
        model: the task or its wrapper.
        trained: the parameters that it trains.
        others: all other trainable parameters.
    """

    name: str
    model: nn.Module
    trained: list[nn.Parameter]
    others: list[nn.Parameter]


class Updates:
    """Takes the optimizer steps of a task's updates.

    Args:
        sample: reads a batch to try an update on; None: it is tried on the first batch that it is trained on.

    Attributes:
        by_name: the updates so far.
        rate: the task's own factors of the learning rates; None if it has none.
        grad_norm: norm of the last update's gradients before clipping; None without clipping.
    """

    def __init__(
        self,
        task: Task,
        strategy: Strategy,
        optimizer: Optimizer,
        clip: Clip,
        meter: Meter,
        rank: Rank,
        sample: Callable[[], Any] | None,
    ) -> None:
        self.task, self.strategy, self.optimizer, self.clip, self.rank = task, strategy, optimizer, clip, rank
        self.precision, self.meter, self.sample = strategy.precision, meter, sample
        self.grad_norm: Tensor | None = None
        self._parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
        self._needs_closure = needs_closure(optimizer)  # such as LBFGS
        self._buffers = SharedBuffers(task, rank)
        # Methods that a task does not override are not called in the loop.
        self.rate = None if type(task).rate is Task.rate else task.rate
        self._has_counts = type(task).count is not Task.count
        self._tried: set[str] = set()
        self._checked: set[str] = set()
        self.by_name: dict[str, Update] = {}
        for name in task.updates():
            update = self._begin(name)
            if sample is not None:
                self._try(update, sample)

    def take(self, step: Step, at: Position) -> bool:
        """Take every update of this step, at position `at`. Returns False if one was skipped (see `Precision.step`)."""
        weights = self._weights(step)
        taken = True
        self._buffers.begin()
        for name in self.task.updates():
            update = self.by_name.get(name) or self._begin(name)
            if name not in self._tried:
                self._try(update, lambda: deepcopy(step.batches[0]))
            gradients = partial(self._gradients, update, step, weights, at)
            if self._needs_closure:
                taken &= self.precision.step(self.optimizer, partial(self._closure, gradients))
                self._stay_together(again=False)
            else:
                gradients()
                taken &= self.precision.step(self.optimizer)
        self._buffers.finish(taken=taken)
        return taken

    def _gradients(self, update: Update, step: Step, weights: Sequence[tuple[float, int]], at: Position) -> Tensor:
        """Compute the clipped gradients of the step's mean loss. Returns this process' part of that loss."""
        self.optimizer.zero_grad(set_to_none=True)
        parts = []
        last = len(step.batches) - 1
        for number, (batch, (weight, count)) in enumerate(zip(step.batches, weights, strict=True)):
            counts = step.global_batch.sizes[number]  # 0: borrowed samples, which must leave no trace
            unchanged = _NOTHING if counts else buffers_unchanged(self.task, self._buffers.kinds)
            with self.strategy.gradient_sync(update.model, number == last), unchanged:
                losses = self.losses(update, batch)
                loss = losses["loss"] if weight == 1.0 else losses["loss"] * weight
                self.precision.backward(loss)
            if update.name != "all":
                losses = {update.name if name == "loss" else name: value for name, value in losses.items()}
            self.meter.add(at.step + 1, losses, count)
            parts.append(loss.detach())
        if update.name not in self._checked:
            self._checked.add(update.name)
            warn_of_unused(self.task, update.trained)
        self._clear_gradients(update)
        self.precision.unscale(self.optimizer)
        self.grad_norm = self.clip(update.trained)
        return sum(parts[1:], parts[0])

    def _closure(self, gradients: Callable[[], Tensor]) -> Tensor:
        """What an optimizer such as LBFGS calls: compute gradients, and the loss over all processes.

        It is the same to the last bit on every process, so all of them take the same decisions in a line search.
        """
        self._stay_together(again=True)
        loss = gradients()
        return (sum_over_ranks(loss.to("cpu", copy=True), self.rank) / self.rank.world_size).to(loss.device)

    def _stay_together(self, *, again: bool) -> None:
        """Raise `UserError` if only some processes call the closure `again`: they would wait for the others."""
        calling = int(sum_over_ranks(torch.tensor(int(again)), self.rank))
        if calling not in (0, self.rank.world_size):
            raise UserError(
                f"optim.optim_type {type(self.optimizer).__name__} calls its closure again on {calling} of "
                f"{self.rank.world_size} processes: how often it does may depend only on the loss, the gradients and "
                "the weights, which are the same on all"
            )

    def losses(self, update: Update, batch: Any) -> Losses:
        """Forward pass and losses of an update for a loaded batch."""
        batch = self.task.prepare_batch(self.precision.cast_batch(batch), self.rank.device)
        with self.precision.autocast():
            losses: Losses = update.model("update", update.name, batch)
        if "loss" not in losses:
            kind = type(self.task).__name__
            raise UserError(
                f"{kind} has no `loss` to minimise in update {update.name}: name losses in the config's section loss, "
                f"or return one from {kind}.losses or {kind}.update"
            )
        return losses

    def _begin(self, name: str) -> Update:
        """Prepare an update before its first step."""
        chosen = set(self.task.trained_by(name))
        trained = [parameter for parameter in self._parameters if parameter in chosen]
        others = [parameter for parameter in self._parameters if parameter not in chosen]
        self.by_name[name] = Update(name, self.strategy.wrap(trained), trained, others)
        return self.by_name[name]

    def _try(self, update: Update, sample: Callable[[], Any]) -> None:
        self._tried.add(update.name)
        warm_up_ddp(update.model, update.trained, lambda: self.losses(update, sample())["loss"], self.rank)

    def _clear_gradients(self, update: Update) -> None:
        """Clear the gradients of what must not change in this step: the optimizer then leaves it alone."""
        for parameter in update.others:
            parameter.grad = None
        if self.rate is not None:
            for group in self.optimizer.param_groups:
                if self.rate(group_name(group)) == 0:
                    for parameter in group["params"]:
                        parameter.grad = None

    def _weights(self, step: Step) -> list[tuple[float, int]]:
        """For each micro-batch: the weight of its mean loss in the step's, and how many items that mean covers."""
        plan = step.global_batch
        if not self._has_counts:
            return list(zip(plan.weights, plan.sizes, strict=True))
        counts = []
        for batch, weight in zip(step.batches, plan.weights, strict=True):
            count = self.task.count(batch)
            if count is None:
                raise UserError(_NO_COUNT.format(kind=type(self.task).__name__, rank=self.rank.rank))
            counts.append(int(count) if weight else 0)
        total = sum_over_ranks(torch.tensor(float(sum(counts)), dtype=torch.float64), self.rank).item()
        return [(count * self.rank.world_size / max(total, 1.0), count) for count in counts]
