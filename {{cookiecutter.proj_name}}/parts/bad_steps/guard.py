"""Judges each update before the optimizer: a bad one is skipped, or the run rewinds to a checkpoint."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from common.base.parts import AVERAGE
from common.checkpoint.file import read_checkpoint, step_of
from common.checkpoint.saver import Saver
from common.checkpoint.state import RunState
from common.data.loader import TrainStream, sample_text
from common.distributed import from_main, sum_over_ranks
from common.distributed.buffers import keep_buffers
from common.finite import not_finite
from common.progress import Position
from parts.bad_steps.config import BadStepsConfig, OptimConfig

_LEAST, _MOST = 20, 100  # steps that a spike is compared with
_REWOUND = ("optimizer", AVERAGE, "precision")  # if the run has them


class Guard:
    """Judges each update before the optimizer, in place of `LossCheck`, identically on all processes.

    A skipped step changes the position of the run and its random generators, and nothing else. In a rewind, weights,
    optimizer, average and scaler become those of a checkpoint, and the run continues after the bad step: the batches in
    between are skipped too, since the weights went wrong with them.

    Attributes:
        strategy, monitor: of the run, defined beside this room.
        anchor: step of the checkpoint to rewind to; 0 for none. One that was saved because of a signal or the time
            does not count: a run that was never stopped would not have it. None, with a policy that is new to a run:
            where it resumed.
        left_out: bad steps in a row; with rewind, since the anchor.
        left_at: the last of them.
        last: loss and gradient norm of the last steps that were taken, by update.
    """

    may_be_new = True

    def __init__(
        self, config: BadStepsConfig, stream: TrainStream, saver: Saver, state: RunState, strategy: Any, monitor: Any
    ) -> None:
        self.config = config
        self.stream = stream
        self.saver = saver
        self.state = state
        self.strategy = strategy
        self.monitor = monitor
        self.anchor: int | None = 0
        self.left_out = 0
        self.left_at = -1
        self.last: dict[str, list[list[float]]] = {}
        self._losses: list[Tensor] = []
        self._restore: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Prepare for an update: keep the buffers that its batches may change."""
        self._losses = []
        self._restore = keep_buffers(self.state.task)

    def __call__(self, at: Position, loss: Tensor) -> None:
        """Keep the loss of a micro-batch."""
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach().sum())

    def refuses(self, update: str, norm: Tensor, at: Position) -> bool:
        """Return whether to skip an update of the step that begins `at`; `norm`: of its gradients.

        Waits for the device and for all processes. Raises `TrainingError` if the run must stop.
        """
        losses = torch.stack(self._losses).tolist() if self._losses else []
        scaler = self.strategy.precision.scaler
        table = torch.tensor([sum(losses), len(losses), float(norm), 1.0], dtype=torch.float64)
        total, count, norms, ranks = sum_over_ranks(table, self.state.rank).tolist()
        values = [total / max(count, 1.0), norms / ranks]
        last = self.last.get(update, [])
        if scaler.is_enabled() and math.isfinite(values[0]) and not math.isfinite(values[1]):
            return False  # the scaler skips it: its scale may be too large
        why = self._fault(values, last)
        if not why:
            self.last[update] = [*last, values][-_MOST:]
            return False
        self._restore()
        self.monitor.meter.discard(at)
        if scaler.is_enabled():
            scaler.update()
        self._leave_out(at, why if update == "all" else f"in update {update}, {why}")
        return True

    def taken(self) -> None:
        """Note that no update of a step was skipped."""
        if self.config.action == "skip":
            self.left_out = 0

    def saved(self, step: int) -> None:
        """Take a planned checkpoint as the one to rewind to."""
        self.anchor = step
        if self.config.action != "skip":
            self.left_out = 0

    def _fault(self, values: list[float], last: list[list[float]]) -> str:
        limits = [math.inf, math.inf]
        spike = self.config.spike
        if spike is not None and len(last) >= _LEAST:
            deviation, mean = torch.std_mean(torch.tensor(last, dtype=torch.float64), 0, correction=0)
            limits = (mean + spike * deviation).tolist()
        for name, value, limit in zip(("loss", "gradient norm"), values, limits, strict=True):
            if not (math.isfinite(value) and value <= limit):
                more = f", more than {limit:.4g}" if math.isfinite(value) else ""
                return f"its {name} is {value:.4g}{more}"
        return ""

    def _leave_out(self, at: Position, why: str) -> None:
        start = at
        step = at.step + 1
        action = self.config.action
        counts = step != self.left_at  # not for a second update of the same step
        is_over = action == "stop" or (counts and self.left_out >= self.config.limit)
        if counts:
            self.left_out += 1
        self.left_at = step
        if action == "rewind" and not is_over:
            start = self._go_back(f"step {step} is bad: {why}")
        samples = sorted(set(self.stream.samples(start, step - start.step, everywhere=True)))
        if is_over:
            more = f", as were {self.left_out - 1} before it" if self.left_out > 1 else ""
            raise not_finite(f"step {step} is bad{more}: {why}{sample_text(samples)}", self.saver)
        self.monitor.recorder.record("skipped", step=step, first=start.step + 1, why=why, samples=samples)
        more = ""
        if action == "rewind":
            more = f"; rewound to step {start.step}, so steps {start.step + 1} to {step} are skipped"
        logger.warning("step {} is skipped{}: {}{}", step, more, why, sample_text(samples))

    def _go_back(self, why: str) -> Position:
        """Take weights and optimizer of the last planned checkpoint. Returns its position."""
        self.saver.wait()
        anchor = self._target()
        if not anchor:
            raise not_finite(f"{why}, and there is nothing to rewind to", self.saver)
        path = from_main(self._checkpoint_at(anchor), self.state.rank)  # every process
        state = self.strategy.shard_state(dict(read_checkpoint(path)))
        found = state["position"]["step"]
        if found != anchor:
            logger.warning("the checkpoint of step {} is gone, so the run rewinds to step {}", anchor, found)
        # These weights have greater losses than those of the bad step.
        self.last = dict(state.get("bad_steps", {}).get("last", {}))
        states = self.state.load_tensors(state, path)
        for name in _REWOUND:
            if name in self.state.states:
                self.state.states[name].load_state_dict(states.get(name, {}))
        return Position(**state["position"])

    def _target(self) -> int | None:
        """Return the step to rewind to: of the last planned checkpoint, else the one that the run began with."""
        if self.anchor is None:
            return self.monitor.start
        return self.anchor

    def _checkpoint_at(self, step: int) -> Path:
        """Return the checkpoint of a step; if there is none any more, the newest."""
        folder = self.saver.folder
        paths = [*folder.files(), folder.source or folder.latest]
        for path in paths:
            if step_of(path) == step:
                return path
        return paths[0]

    def state_dict(self) -> dict[str, Any]:
        """Return what determines how later steps are judged."""
        return {"anchor": self._target(), "left_out": self.left_out, "last": dict(self.last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; that of a run without a policy is empty."""
        self.anchor = state.get("anchor")
        self.left_out = state.get("left_out", 0)
        self.last = dict(state.get("last", {}))


def build(
    config: OptimConfig, stream: TrainStream, saver: Saver, state: RunState, strategy: Any, monitor: Any
) -> Guard | None:
    """Fill the seat `guard` of a step with this section `optim`; None if only losses and gradients are checked."""
    if not config.bad_steps.is_active:
        return None
    return Guard(config.bad_steps, stream, saver, state, strategy, monitor)
