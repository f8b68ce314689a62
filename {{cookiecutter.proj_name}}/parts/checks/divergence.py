"""A warning when the loss diverges but stays finite, from losses that were read for the log anyway."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from math import inf, isfinite
from pathlib import Path
from statistics import median

from loguru import logger

from common.trainer import Trainer

_BLOCK = 20  # losses that are judged together, by their median
_LEAST = 0.1  # a rise from nothing to less than this is no divergence
_PATIENCE = 1000  # steps that a loss may stay high after it was low; early in a run a quarter of its steps
_ADVICE = "try a smaller optim.lr, optim.lr_scheduler.warmup or clip_gradients 1, from a checkpoint before it"


class Divergence:
    """Watches the loss of a run, in each stage anew: losses under other settings are not comparable."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._begin()

    def _begin(self) -> None:
        self._stage = self.trainer.stage.number
        self._watch = DivergenceWatch(logged_losses(self.trainer.paths.metrics_file, self.trainer.stage.start))

    def __call__(self, step: int, loss: float) -> None:
        """Take the loss of a step, over all processes."""
        if self._stage != self.trainer.stage.number:
            self._begin()
        self._watch(step, loss)


class DivergenceWatch:
    """Warns once, when the loss has risen and does not fall again.

    It is high when it is far above its level at the start, or when it has lost four fifths of what it had gained since.
    A single batch, an oscillation, a restart of the rate, or harder data that are then learned are no divergence: the
    lower quartiles of several blocks in a row must be high, and these must not fall.

    Args:
        history: steps and losses of earlier attempts of the run.
    """

    def __init__(self, history: Iterable[tuple[int, float]] = ()) -> None:
        self._block: list[float] = []
        self._noise = deque[float](maxlen=100)
        self._start = inf  # level
        self._best = (0, inf)  # step and level
        self._high: list[tuple[int, float]] = []  # the blocks since the loss rose
        self._has_warned = False
        for step, loss in history:
            self(step, loss)

    def __call__(self, step: int, loss: float) -> None:
        """Take the loss of a step, over all processes."""
        if isfinite(loss) and not self._has_warned:
            self._block.append(loss)
            if self._start == inf and len(self._block) == 5:
                self._start = median(self._block)
                self._best = (step, self._start)
            if len(self._block) == _BLOCK:
                self._judge(step)
                self._block = []

    def _judge(self, step: int) -> None:
        level = median(self._block)
        lower = sorted(self._block)[_BLOCK // 4]
        # From one loss to the next, so that a steep curve does not count as noise; 1.05: their median for a normal law.
        self._noise.append(median(abs(a - b) for a, b in zip(self._block, self._block[1:], strict=False)) * 1.05)
        self._best = min(self._best, (step, level), key=lambda best: best[1])
        noise = 3 * median(self._noise)
        gained = self._start - self._best[1]
        size = max(abs(self._start), _LEAST)
        is_far = lower > self._start + max(min(noise, 4 * size), gained, size)
        is_lost = gained > max(noise, 0.3 * size) and lower > self._start - 0.2 * gained
        if not (is_far or is_lost):
            self._high = []
            return
        self._high.append((step, level))
        least = 3 * _BLOCK if is_far else max(5 * _BLOCK, min(step / 4, _PATIENCE))
        if step - self._high[0][0] >= least:
            levels = [high for _, high in self._high]
            earlier = median(levels[: len(levels) // 2])
            later = median(levels[len(levels) // 2 :])
            if later > earlier - 0.05 * (earlier - self._best[1]):
                self._has_warned = True
                rise = f"from {self._best[1]:.4g} at step {self._best[0]} it has risen to {level:.4g} at step {step}"
                logger.warning("the loss diverges: {}, and does not fall; {}", rise, _ADVICE)


def logged_losses(metrics_file: Path, after: int) -> Iterator[tuple[int, float]]:
    """Yield the steps after `after` and their losses from the log lines in `metrics.jsonl`."""
    with metrics_file.open("rb") as lines:
        for entry in (json.loads(line) for line in lines if line.startswith(b'{"event": "train"')):
            loss = entry["values"].get("loss")
            if entry["step"] > after and isinstance(loss, float):
                yield entry["step"], loss
