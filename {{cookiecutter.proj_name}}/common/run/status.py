"""Who writes to the folder of a run, by its lock, and how far the run is, by `status.json`. Needs no PyTorch."""

import fcntl
import json
import os
import shlex
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from loguru import logger

from common.base.errors import UserError
from common.base.files import write_text
from common.run.paths import RunPaths

State = Literal["running", "stopped", "failed", "finished"]


def write_status(
    folder: RunPaths,
    state: State,
    *,
    step: int | None,
    reason: str = "",
) -> None:
    """Replace `status.json`: `{"state", "step", "reason", "time", "pid"}`."""
    status = {
        "state": state,
        "step": step,
        "reason": reason,
        "time": now(),
        "pid": os.getpid(),
    }
    write_text(folder.status_file, json.dumps(status, indent=2) + "\n")


def read_status(folder: RunPaths) -> dict[str, Any] | None:
    """Read the last status that `write_status` wrote; None if there is none."""
    if not folder.status_file.exists():
        return None
    return json.loads(folder.status_file.read_text())


def now() -> str:
    """Local time with its offset from UTC, as in 2026-03-01T14:05:00+01:00."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


class FolderLock:
    """A held lock file that names its holder. Removed on release; a killed process leaves it behind, unlocked.

    Attributes:
        path: of the file; must be updated when its folder is renamed.
    """

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path = path
        self._file = file
        os.register_at_fork(after_in_child=file.close)  # else a loader's worker would keep the lock of a killed process

    @classmethod
    def take(cls, path: Path) -> "FolderLock":
        """Lock the file `path`, created if needed.

        Raises:
            UserError: another process holds it.
        """
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "another process"
            file.close()
            raise UserError(
                f"{path.parent} is in use by {holder}; wait for it, stop it, or give this run another --name. If its"
                f" machine died, and the file server keeps the lock:  rm {shlex.quote(str(path))}"
            ) from None
        except OSError as error:
            logger.warning("no file locks in {} ({}): make sure that only one process writes there", path.parent, error)
        lock = cls(path, file)
        if not lock.is_in_place():  # the previous holder has just removed it
            file.close()
            return cls.take(path)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {now()}")
        file.flush()
        return lock

    def release(self) -> None:
        """Unlock the folder. Safe to call twice; a file that another process has put in its place stays."""
        with suppress(OSError):
            if self.is_in_place():
                self.path.unlink()
        self._file.close()

    def is_in_place(self) -> bool:
        """Return whether `path` still names the file that is locked."""
        if self._file.closed:
            return False
        try:
            there = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # what is wrong with the disk, a save will say
            return True
        return os.path.samestat(os.fstat(self._file.fileno()), there)
