"""From the first line of a run's log to the last: folder, log and monitor opened together, and closed with a reason."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from common.checkpoint import CheckpointFolder, Found
from common.dist import Rank, barrier
from common.errors import UserError
from common.failsafe import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USER_ERROR
from common.located import with_notes
from common.monitor import Monitor, MonitorConfig
from common.monitor.log import setup_log
from common.provenance import environment_text
from common.run import OpenRun, RunFolder, open_run, write_status


@dataclass(frozen=True)
class Start:
    """How a run starts. `resumed`: the checkpoint of this very folder that it goes on from."""

    argv: Sequence[str]
    values: Mapping[str, Any]
    seed: int
    resumed: Found | None
    local_pictures: bool
    workers: int


@contextmanager
def session(config: MonitorConfig, folder: RunFolder, rank: Rank, start: Start, project: Path) -> Iterator[Monitor]:
    """Open the run; inside, everything is logged. An error shows in the log, in `status.json` and in the exit code."""
    run = _open(folder, rank, start, project)
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
            checkpoints.go_on_from(start.resumed)
    monitor = Monitor(
        config,
        rank,
        run,
        resume_step=None if start.resumed is None else start.resumed.step,
        local_pictures=start.local_pictures,
        workers=start.workers,
    )
    try:
        yield monitor
    except UserError as error:
        logger.error("{}", with_notes(error))
        _leave(monitor, run, rank, EXIT_USER_ERROR, with_notes(error))
    except KeyboardInterrupt:
        logger.error("interrupted twice: left at once, without saving")
        _leave(monitor, run, rank, EXIT_INTERRUPTED, "interrupted twice")
    except Exception as error:  # noqa: BLE001 - whatever it is, the log and the status must tell it
        told = f"{type(error).__name__}: {with_notes(error)}"
        logger.opt(exception=True).critical("{}", told)
        _leave(monitor, run, rank, EXIT_ERROR, told)
    finally:
        monitor.close()
        if run is not None:
            run.release()


def _open(folder: RunFolder, rank: Rank, start: Start, project: Path) -> OpenRun | None:
    if not rank.is_main:
        return None
    return open_run(
        folder,
        resume=start.resumed is not None,
        resolved_values=start.values,
        argv=start.argv,
        seed=start.seed,
        world_size=rank.world_size,
        project=project,
    )


def _leave(monitor: Monitor, run: OpenRun | None, rank: Rank, code: int, reason: str) -> None:
    monitor.writer.record("end", state="failed", reason=reason)
    if run is not None:
        write_status(run.folder, "failed", reason=reason)
    if not rank.is_alone:
        if run is not None:
            run.release()
        # No goodbye to the other processes: they may be waiting for this one. The launcher ends them.
        monitor.close()
        logger.complete()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)
