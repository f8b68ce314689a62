"""`managed_run`: everything around training, from joining the other processes to the last line of the log."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from loguru import logger

from common.base.errors import UserError
from common.base.files import Appender, warn_on_oserror, write_text
from common.checkpoint.file import step_of
from common.checkpoint.folder import CheckpointFolder, LoadedCheckpoint, find_checkpoint
from common.checkpoint.weights import weights_path
from common.config import Resolved, dump
from common.distributed import Rank, barrier, find_rank, from_main
from common.evaluation.best import Best
from common.failure.hub import print_failure
from common.failure.program import distributed_run
from common.failure.report import EXIT_INTERRUPTED, Failure, describe
from common.monitor.log import setup_log
from common.monitor.monitor import Monitor
from common.progress import Outcome
from common.run.folder import OpenRun, is_restart, open_run, refuse_weights_in_moved_run
from common.run.paths import PROJECT, RunPaths
from common.run.record import describe_start, environment_text, read_attempts
from common.run.status import FolderLock, now, read_status, write_status
from common.settings import RunConfig


@contextmanager
def managed_run(config: RunConfig, resolved: Resolved[Any], argv: Sequence[str]) -> Iterator["RunContext"]:
    """Join the other processes, and leave with them. An error inside ends all of them and is reported on the terminal,
    in the log, in `status.json`, and by the exit code.

    Args:
        resolved: the whole config, as plain values.
        argv: the program and its arguments, as in `sys.argv`.

    Raises:
        UserError: the checkpoint does not exist, or the processes do not match.
        SystemExit: an error that was already reported.
    """
    rank = find_rank(config.gpu_ids, config.dist)
    paths = RunPaths.for_run(config.dir, config.name, PROJECT)
    if rank.backend == "nccl":  # torch records exchanges, and writes them before it ends a process that waits in one
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(paths.root / "nccl_rank"))
    with distributed_run(rank, config.dist, resolved) as rank:
        run = RunContext(
            config=config,
            values=resolved.values,
            argv=argv,
            rank=rank,
            paths=paths,
        )
        try:
            run.choose_start()
            yield run
            rank.failure_monitor.sink = print_failure  # the run's record is complete
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            run.fail(error)
            raise
        finally:
            run.close()


@dataclass(kw_only=True)
class RunContext:
    """The surroundings of training: rank, folder, checkpoint and monitor.

    Attributes:
        values: the whole config as plain values.
        argv: the program and its arguments.
        rank: this process' rank in the run.
        paths: the paths in the run's folder.
        checkpoint: the checkpoint that the run starts from, or None.
        folder: the run's folder, once it is open; None in all processes but the main one.
        monitor: exists after `open`.
    """

    config: RunConfig
    values: dict[str, Any]
    argv: Sequence[str]
    rank: Rank
    paths: RunPaths
    checkpoint: LoadedCheckpoint | None = None
    folder: OpenRun | None = None
    monitor: Monitor = field(init=False)
    _resumed: LoadedCheckpoint | None = None  # the checkpoint, if it is in this run's folder
    _is_open: bool = False

    def choose_start(self) -> None:
        """Find the checkpoint that the run starts from."""
        config = self.config
        rank = self.rank
        # A job restarted by its launcher continues its own run, whatever --resume says; never another.
        restarted = is_restart(self.paths, rank) and any(self.paths.checkpoints.glob("*.pt"))
        resume = config.resume
        if from_main(restarted, rank):  # every process
            resume = "auto"
        self.checkpoint = find_checkpoint(resume, self.paths.checkpoints, rank)
        if self.checkpoint is not None and self.paths.contains(resume):
            self._resumed = self.checkpoint
        if self._resumed is None:
            refuse_weights_in_moved_run(weights_path(config.init_from.path, PROJECT), self.paths)

    @property
    def needs_first_weights(self) -> bool:
        """Whether the weights that `init_from` names matter: no checkpoint has them all."""
        if self.checkpoint is None or not self.values["checkpoint"].get("frozen", True):
            return True
        return bool(self.checkpoint.state.get("frozen"))

    def open(self) -> None:
        """Open the run's folder, log and monitor. Moves an earlier run of this name away."""
        config = self.config
        rank = self.rank
        resumed = self._resumed
        barrier(rank)  # all processes have read the checkpoint and built their parts without error
        step = None
        banner = "started again"
        if resumed is not None:
            step = resumed.step
            banner = f"resumed at step {step}"
        if rank.is_main:
            started = describe_start(PROJECT, self.argv, config.dist.random_seed, rank)
            self.folder = open_run(self.paths, self.values, *started, resumed is not None)
        barrier(rank)  # the folder exists
        self._open_log(banner)
        if self.folder is not None:
            CheckpointFolder(self.paths.checkpoints).clean()
        self.monitor = Monitor(
            config.monitor,
            rank,
            self.folder,
            resume_step=step,
            values=self.values,
        )
        self._is_open = True
        rank.failure_monitor.sink = self.record_failure  # not before: the folder may be that of an earlier run
        if config.resume is not None and self.checkpoint is None:
            logger.info("resume {}: nothing was saved yet, so the run starts from the beginning", config.resume)

    def begin(self, step: int, best: Best | None) -> None:
        """Make this attempt, which has restored `step`, the latest of the run: nothing can refuse it any more.

        Args:
            best: the best validation so far.

        Raises:
            UserError: another process has saved a checkpoint meanwhile.
        """
        if self.folder is not None and self.checkpoint is not None:
            path = self.checkpoint.path
            if step_of(path) != step:
                raise UserError(f"{path} was saved by another process while this one started: start this one again")
            checkpoints = CheckpointFolder(self.paths.checkpoints)
            checkpoints.rewind_to(path, step)  # of another run: it becomes this run's latest
            if best is not None:
                with warn_on_oserror("best.pt"):
                    checkpoints.find_best(best.step, path)
        self.monitor.begin()

    def _open_log(self, banner: str) -> None:
        """Continue in the log of the run's folder, after a line with `banner` if there is a log already."""
        file = Appender(self.paths.log_file(self.rank.rank))
        if file.path.stat().st_size > 0:
            file.write(f"\n{f' {banner} ':=^100}\n")
        setup_log(self.config.monitor.log_level, rank=self.rank.rank, file=file)
        if self.folder is not None:
            logger.info("started\n{}", environment_text(self.folder.record))

    def keep_folder(self) -> None:
        """Make the run's folder again if it was moved or deleted. Call it before writing to it.

        Raises:
            UserError: another run has its name by now.
        """
        if self.folder is None or self.folder.lock.is_in_place():
            return
        root = self.paths.root
        if not self.paths.holds_run():
            logger.warning(
                "{} was moved or deleted: checkpoints go to a new folder of this name; the log and the numbers of this"
                " run stay in the one that was moved, or are lost with one that was deleted",
                root,
            )
        elif self.paths.record_file.exists() and read_attempts(self.paths)[-1:] != [self.folder.record]:
            raise UserError(
                f"{root} belongs to another run by now, and stays as it is: the folder of this run was moved or deleted"
                " while it trained; to continue, --resume the moved folder"
            )
        with warn_on_oserror(str(root)):  # the save will fail
            self.paths.checkpoints.mkdir(parents=True, exist_ok=True)
            if not self.paths.record_file.exists():  # `--resume` reads it, and the config
                write_text(self.paths.root / self.folder.record["config"], dump(self.values))
                record = {"name": self.paths.name, "attempts": [self.folder.record]}
                write_text(self.paths.record_file, json.dumps(record, indent=2) + "\n")
            self.folder.lock.release()
            self.folder.lock = FolderLock.take(self.paths.lock_file)

    def end(self, outcome: Outcome) -> None:
        """Write the last log line and the status of a run that ended without an error."""
        self.monitor.end("stopped" if outcome.exit_code else "finished", outcome.at, outcome.reason)

    def close(self) -> None:
        """Close the files and unlock the folder. May be called twice."""
        if self._is_open:
            self.monitor.close()
        if self.folder is not None:
            self.folder.close()

    def fail(self, error: BaseException) -> None:
        """Record `error` and end all processes. Returns only for a single process that has not opened its folder: the
        caller then prints the error."""
        if self.rank.is_single_process and not self._is_open:
            return
        failure = describe(error, self.rank)
        self.rank.failure_monitor.fail(failure)  # if there are other processes, ends this one
        raise SystemExit(failure.code) from None

    def record_failure(self, failure: Failure, to_terminal: bool) -> None:
        """Show the failure that ends the run, of this or another process, and record it in the run's files."""
        self.monitor.fail(failure.reason)
        is_trained = self.monitor.step != self.monitor.start
        if self.folder is not None and not is_trained:
            with suppress(OSError):
                self.folder.forget(not failure.trace)
        level = "ERROR"
        # A rank above 0 logs errors to the terminal too; a warning avoids that if rank 0 has printed it already.
        if not to_terminal:
            level = "WARNING"
        text = failure.text()
        is_ours = self.folder is None or self.folder.lock.is_in_place()  # else another run may have its name
        if is_trained and is_ours and failure.code != EXIT_INTERRUPTED:  # the summary has said it
            again = self.paths.resume_command(self.argv[0])
            if again:
                text += f"\nto resume:  {again}"
        logger.opt(depth=1).log(level, "{}", text)
        if to_terminal and failure.rank == 0 and not self.rank.is_main:  # rank 0 is gone
            with suppress(OSError):
                if (read_status(self.paths) or {}).get("state") == "running":
                    Appender(self.paths.log_file()).write(f"\n{now()} {text}\n")
                    write_status(self.paths, "failed", step=self.monitor.step, reason=failure.reason)
        if not self.rank.is_single_process:  # this process ends without returning from `managed_run`
            self.close()
