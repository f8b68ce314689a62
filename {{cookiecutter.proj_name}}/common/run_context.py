"""From the first line of a run's log to the last: folder, log and monitor opened together, and closed with a reason."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from common.base.errors import UserError
from common.base.files import write_text
from common.checkpoint import CheckpointFolder, LoadedCheckpoint
from common.distributed import Rank, barrier
from common.failure.lifeline import NoLifeline, Tell, print_failure
from common.failure.report import Failure, describe
from common.monitor import Monitor, MonitorConfig
from common.monitor.log import add_to_log, setup_log
from common.run.folder import OpenRun, is_same_launch, open_run
from common.run.lock import check_free
from common.run.paths import RunPaths
from common.run.record import environment_text
from common.run.status import now, read_status, write_status


@dataclass(frozen=True)
class Start:
    """How a run starts. `resumed`: the checkpoint of this very folder that it goes on from."""

    argv: Sequence[str]
    values: Mapping[str, Any]
    seed: int
    resumed: LoadedCheckpoint | None
    local_pictures: bool
    workers: int


@contextmanager
def recorded(tell: Tell, rank: Rank) -> Iterator[None]:
    """Inside, errors are told by `tell`, which leaves them in files, until a `session` has a better place for them."""
    rank.lifeline.tell = tell
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if rank.is_alone:
            rank.lifeline.tell(describe(error, rank), False)  # who catches it says it aloud
        raise


@contextmanager
def session(config: MonitorConfig, folder: RunPaths, rank: Rank, start: Start, project: Path) -> Iterator[Monitor]:
    """Open the run; inside, everything is logged. An error shows in the log, in `status.json` and in the exit code."""
    lifeline = rank.lifeline or NoLifeline()
    barrier(rank)  # none has made a mistake until here, and all have read their checkpoint: the folder may be moved
    with ExitStack() as at_the_end:
        run = _open(folder, rank, start, project)
        if run is not None:
            at_the_end.callback(run.release)
        monitor = _set_up(config, folder, rank, run, start)
        at_the_end.callback(monitor.close)
        lifeline.tell = _Teller(monitor, run, folder, rank)
        try:
            yield monitor
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit) and rank.is_alone:
                raise
            failure = describe(error, rank)
            if not (failure.may_follow or lifeline.is_over):
                keep_error(failure, folder)  # even if it turns out that another rank failed before
            lifeline.fail(failure)  # with other processes, ends this one
            raise SystemExit(failure.code) from None
        lifeline.tell = print_failure  # the run's record is complete


def _set_up(config: MonitorConfig, folder: RunPaths, rank: Rank, run: OpenRun | None, start: Start) -> Monitor:
    barrier(rank)  # the folder is there now
    setup_log(
        config.log_level,
        config.levels,
        rank=rank.rank,
        file=folder.log_file(rank.rank),
        banner=f"resumed at step {start.resumed.step}" if start.resumed is not None else "started again",
    )
    if run is not None:
        logger.info("started\n{}", environment_text(run.record))
        checkpoints = CheckpointFolder(folder.checkpoints)
        checkpoints.clean()
        if start.resumed is not None:
            checkpoints.rewind_to(start.resumed)
    return Monitor(
        config,
        rank,
        run,
        resume_step=None if start.resumed is None else start.resumed.step,
        local_pictures=start.local_pictures,
        workers=start.workers,
    )


@dataclass(frozen=True)
class _Teller:
    """Tells of the failure that ends the run, be it this process' own or another one's."""

    monitor: Monitor
    run: OpenRun | None
    folder: RunPaths
    rank: Rank

    def __call__(self, failure: Failure, aloud: bool) -> None:
        if failure.rank == self.rank.rank:
            keep_error(failure, self.folder)
        folder = self._put_back(failure)
        details = folder.error_file(failure.rank) if failure.trace else None
        if folder is not self.folder:
            text = "no step was trained: {} is the earlier run again, and what this start left is in {}"
            logger.opt(depth=1).warning(text, self.folder.root, folder.root)
        # The log of a rank above 0 puts errors on the terminal; where rank 0 has told already, it should not.
        level = "WARNING" if not aloud else "CRITICAL" if failure.trace else "ERROR"
        logger.opt(depth=1).log(level, "{}", failure.text(details))
        self.monitor.fail(failure.reason)
        if aloud and not self.rank.is_main and failure.rank == 0:
            self._speak_for_rank_0(failure)
        if self.run is not None and not self.rank.is_alone:  # it ends without coming by the end of `session`
            self.monitor.close()
            self.run.release()

    def _put_back(self, failure: Failure) -> RunPaths:
        """Where the files of this start are. Before its first step is done, an earlier run gets its folder back."""
        if self.run is None or self.run.earlier is None or self.monitor.step != self.monitor.start:
            return self.folder
        self.monitor.fail(failure.reason)
        self.monitor.close()
        try:
            return self.run.put_back(self.run.earlier)
        except OSError:  # the log says where the earlier run is
            return self.folder

    def _speak_for_rank_0(self, failure: Failure) -> None:
        """It ended without a word: what it would have left, in files that are there if the folder is shared."""
        status = read_status(self.folder)
        if status is None or status["state"] != "running":
            return
        with suppress(OSError):
            keep_error(failure, self.folder)
            add_to_log(self.folder.log_file(0), f"{now()} {failure.text()}\n", "told by another process")
            write_status(self.folder, "failed", step=self.monitor.step, reason=failure.reason)


def keep_error(failure: Failure, folder: RunPaths) -> None:
    """Leave everything about a failure in a file of the process that failed."""
    with suppress(OSError):  # a full disk, say: the terminal still gets it
        write_text(folder.error_file(failure.rank), f"{now()}\n{failure.text()}\n")


@dataclass(frozen=True)
class BeforeTheRun:
    """Tells of a failure that comes before the run is open: on the terminal, and in the folder it would have had.

    A folder is made only for an error, not for a mistake in the configuration. One that another process uses is left
    alone. An earlier run's, which this start would move away, gets the error and keeps its status.

    Attributes:
        resume: what this start was asked to go on with.
    """

    folder: RunPaths
    rank: Rank
    resume: str | None

    def __call__(self, failure: Failure, aloud: bool) -> None:
        written = False
        with suppress(OSError, UserError):  # it cannot be written, or somebody else writes there
            written = self._write(failure)
        print_failure(failure, aloud, self.folder.error_file(failure.rank) if written and failure.trace else None)

    def _write(self, failure: Failure) -> bool:
        folder, is_new = self.folder, not self.folder.root.is_dir()
        by_itself = self.rank.restarted and is_same_launch(folder, self.rank.launched_as)
        goes_on = by_itself or folder.contains(self.resume)
        of_ours = not is_new and (goes_on or not folder.record_file.exists())
        if not (failure.trace or of_ours):
            return False
        check_free(folder.lock_file)
        folder.root.parent.mkdir(exist_ok=True)
        folder.root.mkdir(exist_ok=True)
        if failure.rank == self.rank.rank:
            keep_error(failure, folder)
        details = folder.error_file(failure.rank) if failure.trace else None
        text = f"{now()} {failure.text(details)}\n"
        add_to_log(folder.log_file(self.rank.rank), text, "a start that failed before the run was open")
        if self.rank.is_main and (is_new or of_ours):
            write_status(folder, "failed", reason=failure.reason)
        return True


@dataclass(frozen=True)
class ErrorFile:
    """Tells of a failure on the terminal, and leaves its traceback in `folder`, as `error_rank<k>.txt`."""

    folder: Path
    rank: Rank

    def __call__(self, failure: Failure, aloud: bool) -> None:
        if failure.trace and failure.rank == self.rank.rank:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
            keep_error(failure, RunPaths(self.folder))
        details = RunPaths(self.folder).error_file(failure.rank) if failure.trace else None
        print_failure(failure, aloud, details)


def _open(folder: RunPaths, rank: Rank, start: Start, project: Path) -> OpenRun | None:
    if not rank.is_main:
        return None
    run = open_run(
        folder,
        resume=start.resumed is not None,
        resolved_values=start.values,
        argv=start.argv,
        seed=start.seed,
        world_size=rank.world_size,
        project=project,
        launcher=rank.launcher,
        processes_per_host=rank.local_world,
        launched_as=rank.launched_as,
    )
    for file in folder.root.glob("error_rank*.txt"):  # of an attempt before this one
        file.unlink(missing_ok=True)
    return run
