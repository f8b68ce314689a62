"""Call the task's method `inspect` at each log line."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.monitor.meter import Timing
from common.progress import Position
from common.run_context import RunContext
from common.trainer import Trainer
from parts.inspect.show import Show


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Let the task show what it wants to, if it has `inspect`: on every process, in evaluation mode."""
    inspect = getattr(trainer.task, "inspect", None)

    def show(at: Position, timing: Timing) -> None:
        with trainer.evaluator.evaluating():
            trainer.task(inspect, Show(trainer))

    if inspect:
        trainer.monitor.after_log.append(show)
    yield
