"""Small files that are whole or not there at all. Checkpoints have their own writer, see `common.checkpoint`."""

import os
from contextlib import suppress
from pathlib import Path


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
