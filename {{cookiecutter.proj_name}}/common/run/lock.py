"""One writer per folder: a lock file that says who holds it, so that a dead holder is recognised."""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loguru import logger

from common.base.errors import UserError
from common.base.files import write_text
from common.run.record import now


class FolderLock:
    """A held lock file. Release it on every way out; a process that is killed leaves it, and the next one sees that."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self._text = text

    @classmethod
    def take(cls, path: Path) -> "FolderLock":
        """Take the lock; that of a dead process is taken over, with a line in the log.

        Call this inside `alone_in`, so that of two processes which find a dead one's lock only one gets it.

        Raises:
            UserError: another process holds it, or held it on another host, where we cannot see whether it lives.
        """
        holder = check_free(path)
        if holder is not None:
            gone = f"process {holder['pid']} on {holder['host']}"
            logger.warning("taking over {} from {}, which is gone", path.parent, gone)
        text = json.dumps(_myself())
        write_text(path, text)
        return cls(path, text)

    def release(self) -> None:
        """Give the folder free. Safe to call twice; a lock that somebody else took over meanwhile is left alone."""
        with suppress(OSError):
            if self.path.read_text() == self._text:
                self.path.unlink()


def check_free(path: Path) -> dict[str, Any] | None:
    """None when nobody holds the lock file `path`; the holder's entry when it is dead.

    Raises:
        UserError: the holder lives, or may live.
    """
    holder = holder_of(path)
    if holder is None or holder["pid"] == "?":
        return holder
    pid, host = int(holder["pid"]), str(holder["host"])
    if host == socket.gethostname():
        if not _lives(pid, holder.get("process_start")):
            return holder
        raise UserError(
            f"{path.parent} is in use by process {pid} on this machine, since {holder.get('time')};"
            f" wait for it, stop it (kill {pid}), or give this run another --name"
        )
    if _is_our_job_before(holder):
        return holder
    raise UserError(
        f"{path.parent} was taken by process {pid} on {host}, at {holder.get('time')}, and was never given free;"
        f" whether it still runs cannot be seen from {socket.gethostname()}. If it does not, remove the lock and start"
        f" again:  rm '{path}'"
    )


def holder_of(path: Path) -> dict[str, Any] | None:
    """Who wrote the lock file `path`, dead or alive; None when there is no such file."""
    try:
        holder = json.loads(path.read_text())
        return {**holder, "pid": int(holder["pid"]), "host": str(holder["host"])}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return {"pid": "?", "host": "?"}  # cut off while it was written: nobody got to hold it


@contextmanager
def alone_in(folder: Path, patience: float = 5.0) -> Iterator[None]:
    """For a moment, be the only process inside this for `folder`: what looks and then acts is done by one at a time.

    Where the file system has no such locks, or one is held for more than `patience` seconds, go on without.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                break
        yield
    finally:
        os.close(handle)


def _myself() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "time": now(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "slurm_restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    }


def _is_our_job_before(holder: Mapping[str, Any]) -> bool:
    """Whether the holder is an earlier start of our own Slurm job: requeued, hence ended, wherever that was."""
    job = os.environ.get("SLURM_JOB_ID")
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    return job is not None and holder.get("slurm_job") == job and int(holder.get("slurm_restart", 0)) < restart


def _lives(pid: int, process_start: str | None) -> bool:
    """Whether process `pid` of this host runs and is the one that started at `process_start` (ids are used again)."""
    if os.name == "nt":
        return True  # there is no harmless way to ask: signal 0 is Ctrl-C there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    current = _process_start(pid)
    if current is None or process_start is None:
        return current != "ended"
    return current == process_start


def _process_start(pid: int) -> str | None:
    """When a process started, in the kernel's units; "ended" for one not yet waited for; None if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the second field, the command's name, may hold spaces and brackets
    return "ended" if fields[0] in "ZX" else fields[19]
