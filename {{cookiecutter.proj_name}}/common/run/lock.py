"""One writer per run folder: a lock that the kernel holds for as long as the process lives, however it ends."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loguru import logger

from common.base.errors import UserError
from common.run.status import now

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two processes apart there
    fcntl = None  # type: ignore[assignment]


class FolderLock:
    """A held lock file. It names its holder, and is removed on release; a killed process leaves the file, unlocked."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle: int | None = handle
        if hasattr(os, "register_at_fork"):  # a loader's worker must not keep the lock when this process is killed
            os.register_at_fork(after_in_child=self._close)

    @classmethod
    def take(cls, path: Path) -> "FolderLock":
        """Lock the file `path`, which is made if needed.

        Raises:
            UserError: another process holds it.
        """
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                is_ours = _try_lock(handle)
            except OSError as error:
                is_ours = True
                logger.warning("no file locks in {} ({}): see that only one process writes there", path.parent, error)
            holder = os.pread(handle, 1000, 0).decode(errors="replace") or "another process"
            if is_ours and _is_file(handle, path):
                break
            os.close(handle)
            if is_ours:  # its last holder has just removed it
                continue
            if not _is_earlier_start_of_this_job(holder):
                raise UserError(
                    f"{path.parent} is in use by {holder}; wait for it, stop it, or give this run another --name. If"
                    f" its machine died, and the file server keeps the lock:  rm '{path}'"
                )
            path.unlink(missing_ok=True)
        if os.fstat(handle).st_size:
            logger.warning("taking over {} from {}, which is gone", path.parent, holder)
        os.ftruncate(handle, 0)
        os.pwrite(handle, _this_process().encode(), 0)
        return cls(path, handle)

    def release(self) -> None:
        """Unlock the folder. Safe to call twice; a file that another process has put in its place stays."""
        if self._handle is not None:
            with suppress(OSError):
                if _is_file(self._handle, self.path):
                    self.path.unlink()
            self._close()

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def check_free(path: Path) -> None:
    """Raise `UserError` when another process holds the lock file `path`."""
    if path.exists():
        FolderLock.take(path).release()


@contextmanager
def alone_in(folder: Path, timeout_s: float = 5.0) -> Iterator[None]:
    """Look and act in `folder` without another process doing so in between.

    Where the file system has no such locks, or one is held for longer, continue without.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + timeout_s
        with suppress(OSError):
            while not _try_lock(handle) and time.monotonic() < until:
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    """Lock an open file; False when another process holds it. Raises `OSError` where there are no locks."""
    if fcntl is None:
        raise OSError("not on this system")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file(handle: int, path: Path) -> bool:
    """Whether `path` still names the file that is open as `handle`."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _this_process() -> str:
    job = f", {_job()}{_restarts()}" if "SLURM_JOB_ID" in os.environ else ""
    return f"process {os.getpid()} on {socket.gethostname()} since {now()}{job}"


def _is_earlier_start_of_this_job(holder: str) -> bool:
    """Whether Slurm has ended the holder, although its machine, which died, could not unlock the file."""
    _, mark, restarts = holder.partition(f", {_job()}")
    return "SLURM_JOB_ID" in os.environ and bool(mark) and int(restarts) < _restarts()


def _job() -> str:
    return f"Slurm job {os.environ.get('SLURM_JOB_ID')} after restart "


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))
