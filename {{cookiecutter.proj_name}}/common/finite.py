"""Infinities and NaNs, found before they reach a checkpoint."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from common.base.parts import fill
from common.checkpoint.saver import Saver
from common.checkpoint.state import RunState
from common.data.loader import TrainStream, sample_text
from common.distributed import Rank
from common.distributed.collectives import local
from common.failure.program import TrainingError
from common.optim.clip import gradient_norm
from common.optim.precision import Precision
from common.progress import Position

_MOST_SKIPPED = 20  # steps in a row that fp16 may skip before the run ends


@torch.no_grad()
def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are finite; of sharded ones, this process' shard.

    Waits for the device.
    """
    held = [part for part in map(local, tensors) if part.numel()]
    if not held:
        return True
    largest = torch._foreach_norm(held, math.inf)  # a sum of squares can overflow
    return bool(torch.stack([value.isfinite() for value in largest]).all())


class LossCheck:
    """Ends the run when a loss or a gradient of this process is not finite.

    On the CPU, a loss is checked before the backward pass, a gradient before the optimizer uses it. The host never
    waits for a GPU: its values are read together, at the next log line, validation or save. Steps after a bad value may
    be taken, but are never saved, see `Trainer.check_losses`.
    """

    def __init__(self, stream: TrainStream, saver: Saver, rank: Rank) -> None:
        self._stream = stream
        self._saver = saver
        self._rank = rank
        self._loss_is_read = True  # whether the last loss is known to be finite
        self._pending: list[tuple[Tensor, Position, str]] = []  # norms on a device, and of which updates

    def __call__(self, at: Position, loss: Tensor) -> None:
        """Check the loss of the step that begins `at`."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:  # `backward` says what is wrong
            return
        self._loss_is_read = loss.is_cpu
        if loss.is_cpu and not math.isfinite(loss.item()):
            raise bad_loss(at, self._stream, self._saver, self._rank)

    def gradients(self, at: Position, update: str, trained: Sequence[Tensor], norm: Tensor | None) -> None:
        """Check the gradients of an update of the step that begins `at`. `norm`: theirs, if it is known.

        A loss on a device, which is read later, may be the cause.
        """
        if norm is None:
            norm = gradient_norm(trained, here=True)
        if norm.is_cpu and self._loss_is_read:
            if not math.isfinite(norm.item()):
                raise self.bad_gradient(at, update, norm.item())
        else:
            self._pending.append((norm, at, update))

    def bad_gradient(self, at: Position, update: str, norm: float) -> TrainingError:
        """Return the error for a gradient that is not finite though the losses are: it is the sum over all samples."""
        samples = dict.fromkeys(self._stream.samples(at, everywhere=True))
        where = f"of step {at.step + 1}{sample_text(list(samples))}"
        if update != "all":
            where = f"of update {update} {where}"
        return not_finite(f"the gradient {where}, has the norm {norm:g}, though the mean loss is finite", self._saver)

    def finish(self, bad_step: int | None) -> None:
        """Check the gradients on a device before `bad_step`, the first with a bad loss. Waits for it."""
        pending = self._pending
        self._pending = []
        if not pending:
            return
        norms = torch.stack([norm.to(pending[-1][0].device) for norm, _, _ in pending]).tolist()
        for norm, (_, at, update) in zip(norms, pending, strict=True):
            if bad_step is not None and at.step + 1 >= bad_step:
                return
            if not math.isfinite(norm):
                raise self.bad_gradient(at, update, norm)


class ScaledSteps:
    """Counts the steps that loss scaling (fp16) skips. A few are usual, until the scale fits.

    Attributes:
        skipped, steps: since the last log line.
    """

    def __init__(self, precision: Precision, saver: Saver) -> None:
        self.skipped = 0
        self.steps = 0
        self._in_a_row = 0
        self._precision = precision
        self._saver = saver

    def add(self, step: int, *, taken: bool) -> None:
        """Count a step, from 1 up. Raises `TrainingError` if a smaller scale will not help."""
        self.steps += 1
        if taken:
            self._in_a_row = 0
            return
        self.skipped += 1
        self._in_a_row += 1
        scale = self._precision.scaler.get_scale()
        if self._in_a_row >= _MOST_SKIPPED or scale < 1:
            what = f"the gradients of the last {self._in_a_row} steps, to step {step}, are not finite in fp16"
            raise not_finite(f"{what}, with a loss scale down to {scale:g}: they were skipped", self._saver)

    def read(self) -> tuple[int, int]:
        """Return how many steps were skipped, and of how many, since the last call."""
        found = (self.skipped, self.steps)
        self.skipped = 0
        self.steps = 0
        return found


class StepGuard(Protocol):
    """The seat `guard` of an optimizer step: judges each update before the optimizer, in place of `LossCheck`.

    Attributes:
        may_be_new: a run may resume with a guard of which its checkpoint has no state.
    """

    may_be_new: bool

    def begin(self) -> None: ...

    def __call__(self, at: Position, loss: Tensor) -> None: ...

    def refuses(self, update: str, norm: Tensor, at: Position) -> bool: ...

    def taken(self) -> None: ...

    def saved(self, step: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def step_check(
    config: Any, stream: TrainStream, saver: Saver, state: RunState, strategy: Any, monitor: Any
) -> LossCheck | StepGuard | None:
    """Return what checks the losses of a stage with this `RunConfig`: a `LossCheck`, or None in debug mode.

    The guard of parts/bad_steps, in its place, judges each update before the optimizer, and is saved with the run.
    """
    if config.debug.debug_mode:  # anomaly detection names the operation; with it, each step is logged, and so checked
        return None
    arguments = (config.optim, stream, saver, state, strategy, monitor)
    guard: StepGuard | None = fill("bad_steps", "guard", None, *arguments)
    if guard is None:
        return LossCheck(stream, saver, state.rank)
    state.states["bad_steps"] = guard
    return guard


def bad_loss(at: Position, stream: TrainStream, saver: Saver, rank: Rank, name: str = "loss") -> TrainingError:
    """Return the error for a loss, of the step that begins `at`, that is not finite on this rank.

    Another `name` is that of a value of the task's.
    """
    if name == "loss":
        name = "the loss"
    where = f"rank {rank.rank}{sample_text(stream.samples(at))}"
    return not_finite(f"{name} of step {at.step + 1} is not a finite number ({where})", saver)


def not_finite(what: str, saver: Saver) -> TrainingError:
    """Return the error that ends a run: the fault, the last checkpoint, and advice."""
    advice = "Check the data for NaN; try a smaller optim.lr, optim.clip_gradients, or --debug."
    saver.wait()  # it may still be writing the last good checkpoint
    return TrainingError(f"{what}; {saver.folder.last_good}.\n  {advice}")
