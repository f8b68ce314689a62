"""The files in which a failed evaluation leaves its traceback; those of a training run are the engine's."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.distributed import Rank
from common.failure.monitor import print_failure
from common.failure.report import Failure, describe
from common.run.paths import RunPaths
from common.run_context import keep_error


@contextmanager
def error_files(rank: Rank, folder: Path) -> Iterator[None]:
    """Write the traceback of an error inside to `error_rank<k>.txt` in `folder`."""
    paths = RunPaths(folder)

    def record_failure(failure: Failure, to_terminal: bool) -> None:
        if failure.trace and failure.rank == rank.rank:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            keep_error(failure, paths)
        print_failure(failure, to_terminal, paths.error_file(failure.rank) if failure.trace else None)

    rank.failure_monitor.sink = record_failure
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if rank.is_alone:
            record_failure(describe(error, rank), False)  # not to the terminal: `reported` prints it
        raise
