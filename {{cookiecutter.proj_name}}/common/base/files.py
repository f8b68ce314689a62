"""Atomic replacement of files, and appending to files."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from loguru import logger

PROJECT = Path(__file__).resolve().parents[2]
"""The root of the project: the folder of `common/` and `train.py`."""


def write_text(path: Path, text: str) -> None:
    """Replace a text file (UTF-8) atomically, see `atomic_file`."""
    with atomic_file(path) as file:
        file.write(text.encode(errors="surrogateescape"))  # file names need not be UTF-8: bytes as they were read


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` once it is complete and synced to disk.

    Raises:
        OSError: it cannot be written; an old file at `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def unused_path(stem: Path, suffix: str = "") -> Path:
    """`<stem><suffix>`; if that name is taken, `<stem>-2<suffix>`, `<stem>-3<suffix>`, ..."""
    number = 1
    path = stem.with_name(stem.name + suffix)
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}{suffix}")
    return path


class Appender:
    """Appends text (UTF-8) to a file, unbuffered: it can be followed, and a killed process loses nothing.

    Text that cannot be written is kept, and written first in the next call: a disk full for an hour loses nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._writing = threading.RLock()  # a signal handler may write in the middle of a write

    def write(self, text: str) -> None:
        """Append `text`, or keep it for later; not after `close`. Thread-safe; never raises `OSError`."""
        if self._file.closed:
            return
        with self._writing:
            was_stuck = bool(self._unwritten)
            self._unwritten += text.encode(errors="surrogateescape")
            try:
                while self._unwritten:
                    self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            except OSError as error:
                if not was_stuck:  # not to the log, which may be this file
                    print(f"warning: {self.path} cannot be written ({error}); the text is kept", file=sys.stderr)

    def close(self) -> None:
        """Close it. Safe to call twice."""
        self.write("")
        self._file.close()


@contextmanager
def warn_on_oserror(what: str) -> Iterator[None]:
    """Log an `OSError` raised in the block as a warning: a failed write does not end the run."""
    try:
        yield
    except OSError as error:
        logger.warning("{} cannot be written: {}", what, error)
