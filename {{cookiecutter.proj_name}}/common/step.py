"""One optimizer step of a task: forward, loss, backward, clip, optimizer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.base.errors import UserError
from common.base.parts import required
from common.data.loader import Step, TrainStream
from common.distributed import Rank, own_buffers, sum_over_ranks
from common.distributed.buffers import buffers_unchanged
from common.evaluation.loss import Losses
from common.finite import LossCheck, ScaledSteps, StepGuard
from common.model import Strategy
from common.model.freeze import warn_of_unused
from common.model.strategy import warm_up_ddp
from common.monitor.meter import Meter
from common.optim import Clip, needs_closure
from common.optim.clip import gradient_norm
from common.progress import Position
from common.settings import RunConfig
from common.task import Task

# Of each micro-batch of this process: its weight in the step's mean loss, and the samples or items it averages over.
Weights = Sequence[tuple[float, int]]
_NO_COUNT = "{kind}.count returned None for a batch of rank {rank}; a task with this method must always return a number"
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass
class TaskUpdate:
    """An update of the task, prepared for training.

    Attributes:
        model: the task or its wrapper.
        forward: calls the task's method `update`.
        trained: parameters that this update trains.
        others: all other trainable parameters.
        is_new: True until its first gradients are computed.
    """

    name: str
    model: nn.Module
    forward: Callable[[str, Any], Losses]
    trained: list[nn.Parameter]
    others: list[nn.Parameter]
    is_new: bool = True


class OptimizerStep:
    """Takes one optimizer step for every update of the task. Built when a stage begins.

    Args:
        stream: a batch of indexed data is read to try each update on; of other data, an update is tried on its first
            training batch.
        check: raises an error for a loss that is not finite; or the seat `guard`, which judges whole updates.
        scaled: counts the steps that loss scaling skips.

    Attributes:
        updates: the prepared updates by name; an update that was not due yet is missing.
        grad_norm: norm of the last update's gradients before clipping; None without clipping.
        separate_micro_batches: whether every micro-batch needs the context `_micro_batch`.
    """

    separate_micro_batches = False

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        strategy: Strategy,
        optimizer: Optimizer,
        stream: TrainStream,
        rank: Rank,
        meter: Meter,
        check: LossCheck | StepGuard | None,
        scaled: ScaledSteps,
    ) -> None:
        self.config = config
        self.task = task
        self.stream = stream
        self.strategy = strategy
        self.precision = strategy.precision
        self.scaler = strategy.precision.scaler  # disabled unless the precision is fp16
        self.optimizer = optimizer
        self.autocast = strategy.precision.autocast
        self.clip = Clip(config.optim)
        self.grad_norm: Tensor | None = None
        self.meter = meter
        self.check = check
        self.loss_check = check if isinstance(check, LossCheck) else None
        self.guard = None if isinstance(check, LossCheck) else check
        self.rank = rank
        self.scaled = scaled
        self.counts_items = type(task).count is not Task.count  # else samples are counted, without a collective
        self.parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
        self.own_buffers = own_buffers(task)
        self.updates: dict[str, TaskUpdate] = {}
        if stream.is_indexed:
            is_full = config.prepare.compile.enabled or config.dist.is_fixed
            for name in task.updates():
                self._begin(name, lambda: stream.sample_batch(full=is_full))

    def __call__(self, step: Step, at: Position) -> bool:
        """Take every update of this step, at position `at`. Returns False if one was skipped (see `Precision.step`)."""
        taken = True
        weights = list(zip(step.global_batch.weights, step.global_batch.sizes, strict=True))
        if self.counts_items:
            weights = self._count(step)  # every process
        for name in self.task.updates():
            update = self.updates.get(name)
            if update is None:  # of a stream, or not due before
                update = self._begin(name, lambda: deepcopy(step.batches[0]))
            if self.guard is not None:
                self.guard.begin()
            self.gradients(update, step, weights, at)
            # A guard decides first; fp16 skips an update whose scaled gradients are not finite.
            is_refused = self.guard is not None and self.guard.refuses(name, self.norm(), at)  # every process
            if is_refused or not self.precision.step(self.optimizer):
                taken = False
        if self.guard is not None and taken:
            self.guard.taken()
        if self.scaler.is_enabled():
            self.scaled.add(at.step + 1, taken=taken)
        if taken:
            self.task.after_step()
        return taken

    def gradients(self, update: TaskUpdate, step: Step, weights: Weights, at: Position) -> None:
        """Compute the clipped gradients of the step's mean loss."""
        for parameter in self.parameters:
            parameter.grad = None
        sizes = step.global_batch.sizes
        last = len(step.batches) - 1
        for number, batch in enumerate(step.batches):
            weight, count = weights[number]
            context: AbstractContextManager[None] = _NOTHING
            # A single full micro-batch has nothing to postpone or to undo. Size 0: borrowed samples, so that all
            # processes compute the same number of micro-batches.
            if last > 0 or sizes[number] == 0 or self.separate_micro_batches:
                context = self._micro_batch(update, number == last, sizes[number])
            with context:
                batch = self.precision.cast_batch(batch)
                batch = self.task.prepare_batch(batch, self.rank.device)
                with self.autocast():
                    losses = update.forward(update.name, batch)  # Task.update, which calls output and losses
                if "loss" not in losses:
                    raise self._no_loss(update)
                loss = losses["loss"]
                if self.check is not None and count > 0:
                    self.check(at, loss)
                if weight != 1.0:
                    loss = loss * weight
                self.scaler.scale(loss).backward()  # with DDP, the last micro-batch's averages gradients: every process
            if update.name != "all":  # several updates have a loss each
                others = {name: value for name, value in losses.items() if name != "loss"}
                losses = {update.name: losses["loss"], **others}
            self.meter.add(at, losses, count)
        if update.is_new:
            update.is_new = False
            warn_of_unused(self.task, update.trained)
        for parameter in update.others:  # they must not change in this step: the optimizer skips them
            parameter.grad = None
        self.scaler.unscale_(self.optimizer)
        if self.clip.is_active:
            self.grad_norm = self.clip(update.trained)  # every process, if gradients are sharded
        if self.loss_check is not None and not self.scaler.is_enabled():
            self.loss_check.gradients(at, update.name, update.trained, self.grad_norm)

    @contextmanager
    def _micro_batch(self, update: TaskUpdate, is_last: bool, size: int) -> Iterator[None]:
        """Sync gradients in the last micro-batch only; undo changes of buffers by a batch of size 0."""
        unchanged = _NOTHING
        if size == 0:
            unchanged = buffers_unchanged(self.task, self.own_buffers)
        with self.strategy.gradient_sync(update.model, is_last), unchanged:
            yield
        if self.strategy.copy_gradients and not is_last:
            for parameter in update.trained:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()

    def _begin(self, name: str, sample: Callable[[], Any]) -> TaskUpdate:
        """Prepare an update before its first step; with DDP, try it."""
        chosen = set(self.task.trained_by(name))
        trained = [parameter for parameter in self.parameters if parameter in chosen]
        others = [parameter for parameter in self.parameters if parameter not in chosen]
        model = self.strategy.wrap(trained)
        forward: Callable[[str, Any], Losses] = self.task.update
        # Called through a wrapper, and through the task where it is sharded: that is where wrappers and hooks act.
        if model is not self.task or self.strategy.lockstep_forward:
            forward = partial(model, self.task.update)
        update = TaskUpdate(name, model, forward, trained, others)
        self.updates[name] = update
        # With DDP, one backward pass, discarded: a resumed run then adds gradients in the order of an uncut run.
        warm_up_ddp(model, trained, lambda: self.trial_loss(update, forward, sample()), self.rank)  # every process
        return update

    def trial_loss(self, update: TaskUpdate, forward: Callable[[str, Any], Losses], batch: Any) -> Tensor:
        """Return the loss of a loaded batch, without taking a step."""
        batch = self.precision.cast_batch(batch)
        batch = self.task.prepare_batch(batch, self.rank.device)
        with self.autocast():
            losses = forward(update.name, batch)
        if "loss" not in losses:
            raise self._no_loss(update)
        return losses["loss"]

    def norm(self) -> Tensor:
        """Return the norm of the last update's gradients before clipping, or of all if nothing is clipped."""
        if self.grad_norm is None:
            return gradient_norm(self.parameters)
        return self.grad_norm

    def _no_loss(self, update: TaskUpdate) -> UserError:
        kind = type(self.task).__name__
        return UserError(
            f"{kind} has no `loss` to minimise in update {update.name}: name losses in the config's section loss, "
            f"or return one from {kind}.losses or {kind}.update"
        )

    def _count(self, step: Step) -> list[tuple[float, int]]:
        """Weigh the micro-batches by the items that the task counts. Every process must call this."""
        counts = []
        for batch, weight in zip(step.batches, step.global_batch.weights, strict=True):
            count = self.task.count(batch)
            if count is None:
                raise UserError(_NO_COUNT.format(kind=type(self.task).__name__, rank=self.rank.rank))
            counts.append(int(count) if weight else 0)
        here = torch.tensor(float(sum(counts)), dtype=torch.float64)
        total = sum_over_ranks(here, self.rank).item()
        self.meter.clock.items += total
        return [(count * self.rank.world_size / max(total, 1.0), count) for count in counts]


def step_class(config: RunConfig, optimizer: Optimizer) -> type[OptimizerStep]:
    """Return what takes the steps of a stage: a part's class in the seat `step` if the settings ask for it."""
    if config.dist.is_fixed:
        return required("reduction", "step", "dist.reduction").FixedStep
    if needs_closure(optimizer):
        return required("closures", "step", f"optim.optim_type {config.optim.optim_type}").ClosureStep
    return OptimizerStep
