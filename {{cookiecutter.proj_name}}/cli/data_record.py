"""Record each file and row of a run's data in `data.npz`, so that `tools.verify` can name what has changed since."""

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from common.base.files import atomic_file, warn_on_oserror
from common.data.digest import Search, search
from common.run_context import RunContext
from common.task import Parts

RECORD = "data.npz"
_UNREAD = -1  # instead of the checksum of a file's contents
_BYTES = 1 << 28  # read of the files of a dataset; if they are larger, of evenly spread ones
_ROWS = 1 << 17  # checksums of an array; rows of a longer one are taken together
_PATIENCE_S = 10.0  # how long the end of a training waits for the record


@contextmanager
def data_record(run: RunContext, parts: Parts) -> Iterator[None]:
    """Write the record while the block trains, since reading files can take minutes. A resume keeps the first one."""
    file = run.paths.root / RECORD
    if run.folder is None or file.exists():
        yield
        return
    searches = {name: search(dataset) for name, dataset in parts.deciding_data().items()}  # before training alters it
    writer = Thread(target=write_record, args=(file, searches), daemon=True)
    writer.start()
    yield
    writer.join(_PATIENCE_S)


def write_record(file: Path, searches: Mapping[str, Search]) -> None:
    """Write the numbers of `items` for each dataset, by its name."""
    record = {name: items(held)[1] for name, held in searches.items()}
    with warn_on_oserror(file.name), atomic_file(file) as out:
        np.savez(out, **record)  # type: ignore[arg-type]


def items(held: Search) -> tuple[list[str], NDArray[np.int64]]:
    """Identify each file and row of a dataset.

    Returns:
        Their names, and of each four numbers: checksum of the name, size, time, checksum of the contents.
    """
    names = [name.lstrip(os.sep) for name in held.names()]
    numbers = np.array([(zlib.crc32(os.fsencode(name)), 0, 0, _UNREAD) for name in names], np.int64).reshape(-1, 4)
    numbers[:, 1:3] = np.array([file[1:] for file in held.files], np.int64).reshape(-1, 2)
    read = np.arange(0, len(names), max(1, -(-int(numbers[:, 1].sum()) // _BYTES)))
    for at in read[np.cumsum(numbers[read, 1]) <= _BYTES]:
        numbers[at, 3] = _checksum(held.files[at][0])
    rows = []
    for number, array in enumerate(held.held):
        length = max(1, -(-len(array) // _ROWS))
        for first in range(0, len(array), length):
            names.append(f"row {first} of array {number}")
            rows.append((zlib.crc32(names[-1].encode()), 0, 0, zlib.crc32(array[first : first + length].tobytes())))
    return names, np.concatenate([numbers, np.array(rows, np.int64).reshape(-1, 4)])


def changed_items(old: NDArray[np.int64], held: Search) -> tuple[list[str], int]:
    """Return the names of the files and rows that differ from their record, and how many files are not read."""
    names, new = items(held)
    if not np.array_equal(old[:, 0], new[:, 0]):
        added = [f"{names[at]} (new)" for at in np.flatnonzero(~np.isin(new[:, 0], old[:, 0]))]
        gone = int((~np.isin(old[:, 0], new[:, 0])).sum())
        return [*added, f"{gone} files or rows gone"] if added or gone else ["files in another order"], 0
    size, time, contents = (old[:, 1:] != new[:, 1:]).T
    unread = (old[:, 3] == _UNREAD) | (new[:, 3] == _UNREAD)
    is_copy = time[unread].all()  # its times are all new, and say nothing
    other = size | (contents & ~unread) | (time & unread & ~is_copy)
    return [names[at] for at in np.flatnonzero(other)], int(unread.sum())


def _checksum(path: str) -> int:
    total = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(1 << 20):
                total = zlib.crc32(block, total)
    except OSError:  # reported where it is read for training
        return _UNREAD
    return total
