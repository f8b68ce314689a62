"""Write the report of a run when it has ended."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.run_context import RunContext
from common.trainer import Trainer


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Write the report after the block, unless a signal ended the training: such a job has no time for it."""
    yield
    if run.rank.is_main and not trainer.progress.signal:
        from tools.runs.report import write_report  # its imports would delay every start

        write_report(run.paths.root)
