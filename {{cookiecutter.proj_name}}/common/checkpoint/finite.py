"""Infinities and NaNs, found before they reach a checkpoint; and steps that are skipped because of them."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from common.checkpoint.file import read_checkpoint
from common.checkpoint.saver import Saver
from common.checkpoint.state import RunState
from common.data.loader import BatchStream
from common.data.whereabouts import bad_samples, sample_text
from common.distributed import Rank, from_main, gather_objects, has_streams, sum_over_ranks
from common.distributed.buffers import keep_buffers
from common.distributed.sharded import local
from common.failure.program import TrainingError
from common.optim import BadStepsConfig
from common.optim.precision import Precision
from common.progress import Position

_LEAST, _MOST = 20, 100  # steps that a spike is compared with
# Steps that fp16 skips in a row: a warning, or while the first scale is sought (from 65,536 down); the end of the run.
_WARNED, _SEARCH, _ENDED = 5, 10, 20
_REWOUND = ("optimizer", "ema", "precision")


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are finite; of sharded ones, this process' shard.

    Waits for the device.
    """
    norms = torch._foreach_norm([local(tensor.detach()) for tensor in tensors])
    return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())


class LossCheck:
    """Ends the run before the optimizer uses a loss or a gradient of this process that is not finite.

    On the CPU a loss is checked before the backward pass, which no other process can then finish. The host never waits
    for a GPU: values are copied while it continues, and checked as soon as one is asked for after they have come. So a
    few steps may be taken with a bad one; they are never saved, see `Trainer.check_losses`.
    """

    def __init__(self, stream: BatchStream, saver: Saver, rank: Rank) -> None:
        self._about = stream, saver, rank
        self._coming = deque[_Copied]()  # losses and norms of gradients, in the order in which they were computed

    def __call__(self, step: int, loss: Tensor) -> None:
        """Check the loss of `step`, counted from 1; on a GPU, those before it that have come."""
        if isinstance(loss, Tensor) and loss.numel() == 1:  # of any other, `backward` says what is wrong
            self._check(loss, lambda _: bad_loss(step, *self._about))

    def gradient(self, at: Position, update: str, norm: Tensor) -> None:
        """Check the gradient of an update of the step that begins `at`, by its norm; one on a GPU later."""
        self._check(norm, partial(self.bad_gradient, at, update))

    def bad_gradient(self, at: Position, update: str, norm: float) -> TrainingError:
        """Return the error for a gradient that is not finite though the losses are: it is the sum over all samples."""
        stream, saver, _ = self._about
        of = "" if update == "all" else f" of update {update}"
        samples = sorted({number for batch in stream.samples(at, everywhere=True) for number in batch})
        where = sample_text([samples])
        return not_finite(
            f"the gradient{of} of step {at.step + 1}{where}, has the norm {norm:g}, though its loss is finite", saver
        )

    def finish(self) -> None:
        """Check what was copied. Waits for the device."""
        if self._coming:
            self._coming[-1].event.synchronize()  # the others came before it
        while self._coming:
            self._coming.popleft().check()

    def _check(self, value: Tensor, error: Callable[[float], TrainingError]) -> None:
        if has_streams(value.device):
            self._coming.append(_Copied(value, error))
            while self._coming and self._coming[0].event.query():
                self._coming.popleft().check()
        elif value.is_cpu and not math.isfinite(value.item()):  # that of an Apple GPU waits for the next log line
            raise error(value.item())


class _Copied:
    """A scalar on its way from the device; `event`: when it has come."""

    def __init__(self, value: Tensor, error: Callable[[float], TrainingError]) -> None:
        self.value, self.error = value.detach().to("cpu", non_blocking=True), error
        self.event = torch.Event(value.device)
        self.event.record()

    def check(self) -> None:
        if not math.isfinite(self.value.item()):
            raise self.error(self.value.item())


class ScaledSteps:
    """Counts the steps that loss scaling (fp16) skips. A few are usual, until the scale fits.

    Attributes:
        skipped, steps: since the last log line.
        total: skipped steps of this process.
    """

    def __init__(self, precision: Precision, saver: Saver) -> None:
        self.skipped = self.steps = self.total = self._in_a_row = 0
        self._warn_at = _SEARCH
        self._about = precision, saver

    def add(self, step: int, *, taken: bool) -> None:
        """Count a step, from 1 up. Raises `TrainingError` if a smaller scale will not help."""
        self.steps += 1
        if taken:
            self._in_a_row, self._warn_at = 0, _WARNED
            return
        self.skipped += 1
        self.total += 1
        self._in_a_row += 1
        precision, saver = self._about
        scale = precision.scale()
        what = f"the gradients of the last {self._in_a_row} steps, to step {step}, are not finite in fp16"
        if self._in_a_row >= _ENDED or scale < 1:
            raise not_finite(f"{what}, with a loss scale down to {scale:g}: they were skipped", saver)
        if self._in_a_row == self._warn_at:
            logger.warning("{}: they were skipped, and the loss scale is {:g} now", what, scale)

    def read(self) -> tuple[int, int]:
        """Return how many steps were skipped, and of how many, since the last call."""
        found = self.skipped, self.steps
        self.skipped = self.steps = 0
        return found


@dataclass
class StepGuard:
    """Judges each update before the optimizer, in place of `LossCheck`, identically on all processes.

    A skipped step changes the position of the run and its random generators, and nothing else. In a rewind, weights,
    optimizer, EMA and scaler become those of a checkpoint, and the run continues after the bad step: the batches in
    between are skipped too, since the weights went wrong with them.

    Attributes:
        strategy, monitor: of the run, defined beside this room.
        anchor: step of the checkpoint to rewind to; 0 for none. One that was saved because of a signal or the time
            does not count: a run that was never stopped would not have it.
        left_out: bad steps in a row; with rewind, since the anchor.
        left_at: the last of them.
        last: loss and gradient norm of the last steps that were taken, by update.
    """

    config: BadStepsConfig
    stream: BatchStream
    saver: Saver
    state: RunState
    strategy: Any
    monitor: Any
    anchor: int = 0
    left_out: int = 0
    left_at: int = -1
    last: dict[str, list[list[float]]] = field(default_factory=dict)

    def begin(self) -> None:
        """Prepare for an update: keep the buffers that its batches may change."""
        self._losses, self._restore = list[Tensor](), keep_buffers(self.state.task)

    def __call__(self, step: int, loss: Tensor) -> None:
        """Keep the loss of a micro-batch."""
        self._losses += [loss.detach().sum()] if isinstance(loss, Tensor) else []

    def refuses(self, update: str, norm: Tensor, at: Position, scale_helps: Callable[[], bool]) -> bool:
        """Return whether to skip an update of the step that begins `at`; `norm`: of its gradients.

        `scale_helps`: asked, with fp16, about a gradient that is NaN.

        Waits for the device and for all processes. Raises `TrainingError` if the run must stop.
        """
        losses, scaler = [float(loss) for loss in self._losses], self.strategy.precision.scaler
        table = torch.tensor([sum(losses), len(losses), float(norm), 1.0], dtype=torch.float64)
        total, count, norms, ranks = sum_over_ranks(table, self.state.rank).tolist()
        values, last = [total / max(count, 1.0), norms / ranks], self.last.get(update, [])
        if scaler is not None and math.isfinite(values[0]) and not math.isfinite(values[1]) and scale_helps():
            return False  # the scaler skips it: its scale was too large, and nothing is wrong
        if why := self._fault(values, last):
            self._restore()
            self.monitor.meter.discard(at.step + 1)
            if scaler is not None:
                scaler.update()
            self._leave_out(at, f"in update {update}, " * (update != "all") + why)
        else:
            self.last[update] = [*last, values][-_MOST:]
        return bool(why)

    def taken(self) -> None:
        """Note that no update of a step was skipped."""
        self.left_out *= self.config.action != "skip"

    def saved(self, step: int) -> None:
        """Take a planned checkpoint as the one to rewind to."""
        self.anchor, self.left_out = step, self.left_out * (self.config.action == "skip")

    def _fault(self, values: list[float], last: list[list[float]]) -> str:
        limits, spike = [math.inf, math.inf], self.config.spike
        if spike is not None and len(last) >= _LEAST:
            deviation, mean = torch.std_mean(torch.tensor(last, dtype=torch.float64), 0, correction=0)
            limits = (mean + spike * deviation).tolist()
        for name, value, limit in zip(("loss", "gradient norm"), values, limits, strict=True):
            if not (math.isfinite(value) and value <= limit):
                return f"its {name} is {value:.4g}" + f", more than {limit:.4g}" * math.isfinite(value)
        return ""

    def _leave_out(self, at: Position, why: str) -> None:
        start, step, action = at, at.step + 1, self.config.action
        counts = step != self.left_at  # not for a second update of the same step
        is_over = action == "stop" or (counts and self.left_out >= self.config.limit)
        self.left_out, self.left_at = self.left_out + counts, step
        if action == "rewind" and not is_over:
            start = self._go_back(f"step {step} is bad: {why}")
        shares = gather_objects(self.stream.samples(start, step - start.step), self.state.rank)
        samples = sorted({number for share in shares for batch in share for number in batch})
        if is_over:
            more = f", as were {self.left_out - 1} before it" if self.left_out > 1 else ""
            raise not_finite(f"step {step} is bad{more}: {why}{sample_text([samples])}", self.saver)
        self.monitor.recorder.record("skipped", step=step, first=start.step + 1, why=why, samples=samples)
        more = f"; rewound to step {start.step}, so steps {start.step + 1} to {step} are skipped"
        logger.warning("step {} is skipped{}: {}{}", step, more * (action == "rewind"), why, sample_text([samples]))

    def _go_back(self, why: str) -> Position:
        """Take weights and optimizer of the last planned checkpoint. Returns its position."""
        self.saver.wait()
        if not (anchor := self.anchor or self.monitor.start):  # with a policy that is new to a run: where it resumed
            raise not_finite(f"{why}, and there is nothing to rewind to", self.saver)
        path = from_main(self.saver.folder.at_step(anchor), self.state.rank)
        state = self.strategy.shard_state(dict(read_checkpoint(path)))
        if (found := state["position"]["step"]) != anchor:
            logger.warning("the checkpoint of step {} is gone, so the run rewinds to step {}", anchor, found)
        # These weights have greater losses than those of the bad step.
        self.last = dict(state.get("bad_steps", {}).get("last", {}))
        return self.state.load_state_dict(state, path, only=_REWOUND)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return what determines how later steps are judged."""
        return {"anchor": self.anchor, "left_out": self.left_out, "last": dict(self.last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; that of a run without a policy is empty."""
        vars(self).update(state)


def step_check(
    config: Any, stream: BatchStream, saver: Saver, state: RunState, strategy: Any, monitor: Any
) -> LossCheck | StepGuard | None:
    """Return what checks the losses of a stage with this `RunConfig`; with `optim.bad_steps`, also the gradients."""
    if config.debug.debug_mode:  # anomaly detection names the operation; with it, each step is logged, and so checked
        return None
    if not config.optim.bad_steps.is_active:
        return LossCheck(stream, saver, state.rank)
    state.parts["bad_steps"] = guard = StepGuard(config.optim.bad_steps, stream, saver, state, strategy, monitor)
    return guard


def bad_loss(step: int, stream: BatchStream, saver: Saver, rank: Rank, name: str = "loss") -> TrainingError:
    """Return the error for a loss of `step` that is not finite on this rank; another `name`: a value of the task's."""
    what = "the loss" if name == "loss" else name
    return not_finite(f"{what} of step {step} is not a finite number ({bad_samples(stream, step, rank)})", saver)


def not_finite(what: str, saver: Saver) -> TrainingError:
    """Return the error that ends a run: the fault, the last checkpoint, and advice."""
    advice = "Check the data for NaN; try a smaller optim.lr, clip_gradients, optim.bad_steps (skip, rewind), --debug."
    saver.wait()  # it may still be writing the last good checkpoint
    return TrainingError(f"{what}; {saver.folder.last_good}.\n  {advice}")
