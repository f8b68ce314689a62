"""Open a run: lock its folder, move an earlier run away, and record how the run was started."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from loguru import logger

from common.base.errors import UserError
from common.base.files import unused_path, write_text
from common.config import dump
from common.distributed import Rank
from common.run.paths import RunPaths
from common.run.record import read_attempts
from common.run.status import FolderLock


@dataclass
class OpenRun:
    """A run folder that this process may write to until `close`.

    Attributes:
        attempt: 1 for a new run, plus one for every resume.
        id: name and first start of the run; the same in every attempt.
        record: this attempt's entry of `run.json`.
        before: the texts of `run.json` and `status.json` before this attempt.
        moved: where the earlier run of this name is now; None if there was none.
    """

    folder: RunPaths
    lock: FolderLock
    attempt: int
    id: str
    record: dict[str, Any] = field(repr=False)
    before: Mapping[Path, str] = field(repr=False)
    moved: Path | None

    def forget(self, refused: bool) -> None:
        """Undo this attempt, which trained no step. An earlier run gets its name back, and the failed one another.

        The record of a resume is removed, so the next one reads the previous config.

        Args:
            refused: also restore the old status of a resume; after a crash, the new one stays.
        """
        if self.before:
            (self.folder.root / self.record["config"]).unlink(missing_ok=True)
        for file, text in self.before.items():
            if refused or file == self.folder.record_file:
                write_text(file, text)
                os.utime(file, (0, 0))  # dated 1970: tools/slurm and tools/sweep take it for old
        root = self.folder.root
        if self.moved is not None:
            failed = unused_path(root.with_name(f"{root.name}_failed"))
            root.rename(failed)
            self.lock.path = failed / self.lock.path.name
            self.moved.rename(root)
            logger.info("{} is the earlier run again; the failed one is now {}", root, failed)

    def close(self) -> None:
        """Unlock the folder. Safe to call twice."""
        self.lock.release()


def open_run(
    folder: RunPaths,
    values: Mapping[str, Any],
    attempt: dict[str, Any],
    patch: str,
    resume: bool,
) -> OpenRun:
    """Lock the folder and record how the run was started. For the main process only.

    A new run never overwrites an old one, which is moved to `<name>_<its start>`. With `resume` (from a
    checkpoint of this very folder) everything stays, and the new configuration goes to `config.resume-<n>.yaml`.

    Args:
        values: the complete configuration.
        attempt, patch: see `record.describe_start`.

    Raises:
        UserError: the folder cannot be written, or is in use by another process.
    """
    lock = None
    moved = None
    try:
        folder.root.parent.mkdir(exist_ok=True)
        if not resume:
            moved = _move_away(folder)
        folder.root.mkdir(exist_ok=True)
        lock = FolderLock.take(folder.lock_file)
        before = {}
        for file in (folder.record_file, folder.status_file):
            if resume and file.is_file():
                before[file] = file.read_text()
        _write_record(folder, attempt, values, patch)
        run_id = f"{folder.name}_{_first_start(folder)}"
        return OpenRun(folder, lock, attempt["attempt"], run_id, attempt, before, moved)
    except OSError as error:
        if lock is not None:
            lock.release()
        raise UserError(f"{folder.root} cannot be written: {error}; choose another place: --dir.runs_dir") from error


def is_restart(folder: RunPaths, rank: Rank) -> bool:
    """Return whether the launcher has restarted this process, and an earlier start of its launch has opened the run."""
    if not rank.restarted:
        return False
    attempts = read_attempts(folder)
    if not attempts:
        return False
    launched_as = attempts[-1].get("launched_as", ())
    return not set(launched_as).isdisjoint(rank.launched_as)


def refuse_weights_in_moved_run(path: str | None, folder: RunPaths) -> None:
    """Raise `UserError` for weights of the run that a new one moves away: a resume would find other weights there."""
    if folder.contains(path):
        raise UserError(
            f"init_from.path: {path} belongs to the run in {folder.root}, which a new run of this name moves out of the"
            " way; give the new run another --name"
        )


def _move_away(folder: RunPaths) -> Path | None:
    """Rename the folder of an earlier run to `<name>_<its start>`, and return that; None if there is no run."""
    if not folder.holds_run():
        return None
    target = unused_path(folder.root.with_name(f"{folder.name}_{_first_start(folder)}"))
    lock = FolderLock.take(folder.lock_file)  # so another process cannot start writing there meanwhile
    folder.root.rename(target)
    lock.path = target / lock.path.name
    lock.release()
    logger.info("moved an earlier run {} to {}", folder.name, target)
    return target


def _first_start(folder: RunPaths) -> str:
    """Time of the first start, as in 20260301-140500; without a record, of the folder's last change."""
    attempts = read_attempts(folder)
    start = datetime.fromtimestamp(folder.root.stat().st_mtime)
    if attempts:
        start = datetime.fromisoformat(attempts[0]["time"])
    return f"{start:%Y%m%d-%H%M%S}"


def _write_record(
    folder: RunPaths,
    attempt: dict[str, Any],
    values: Mapping[str, Any],
    patch: str,
) -> None:
    """Write the files that record how the run was started. Adds number and config file name to `attempt`."""
    attempts = [*read_attempts(folder), attempt]
    number = 1
    suffix = ""
    while (folder.root / f"config{suffix}.yaml").exists():
        suffix = f".resume-{number}"
        number += 1
    config_file = folder.root / f"config{suffix}.yaml"
    folder.checkpoints.mkdir(exist_ok=True)
    number = max(number, len(attempts))
    attempt |= {"attempt": number, "config": config_file.name}
    header = f"# Complete configuration of the run {folder.name!r}, attempt {number}, {attempt['time']}.\n"
    write_text(config_file, header + dump(dict(values)))
    write_text(folder.root / f"git{suffix}.diff", patch)
    record = {"name": folder.name, "attempts": attempts}
    write_text(folder.record_file, json.dumps(record, indent=2) + "\n")
