"""Small files that are whole or not there at all, and files that grow. Checkpoints have their own writer."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loguru import logger


def write_text(path: Path, text: str) -> None:
    """Write a text file (UTF-8), as `write_bytes` does."""
    # File names can hold what is no UTF-8; it goes out as it came in.
    write_bytes(path, text.encode(errors="surrogateescape"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write beside, to the disk, then rename: whatever happens, the old file stays until the new one is whole.

    Raises:
        OSError: it cannot be written; an old file of that name is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def unused(stem: Path, suffix: str = "") -> Path:
    """`<stem><suffix>`; where that name is taken, `<stem>-2<suffix>`, `<stem>-3<suffix>`, ..."""
    number, path = 1, stem.with_name(stem.name + suffix)
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}{suffix}")
    return path


class Appender:
    """Appends text (UTF-8) to a file, to which it goes at once: it can be followed, and a killed process loses nothing.

    What the disk does not take is kept, and written before what comes next: one that is full for an hour costs nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._writing = threading.RLock()  # a signal handler may write in the middle of a write

    def write(self, text: str) -> None:
        """Append `text`, or keep it; from any thread. Never raises `OSError`."""
        with self._writing:
            was_stuck = bool(self._unwritten)
            self._unwritten += text.encode(errors="surrogateescape")
            try:
                while self._unwritten:
                    self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            except OSError as error:
                if not was_stuck:  # not by the log, which may be this very file
                    print(f"warning: {self.path} cannot be written ({error}); what is to come is kept", file=sys.stderr)

    def close(self) -> None:
        """Close it. Safe to call twice."""
        if not self._file.closed:
            self.write("")
            self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed


@contextmanager
def warn_on_oserror(what: str) -> Iterator[None]:
    """Inside, a file that cannot be written costs a warning, not the run: it can be done without."""
    try:
        yield
    except OSError as error:
        logger.warning("{} cannot be written: {}", what, error)
