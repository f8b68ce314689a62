"""A record of each file and row of a run's data, kept in its folder: `tools.verify` names what has changed since."""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.base.files import atomic_file
from common.data.digest import Search, differences, search

_WHOLE = 1 << 28  # bytes read of each data set; of more data, evenly spread files
_ROWS = 1 << 17  # checksums of each array; rows of longer ones are taken together
_THREADS = 8
_UNREAD = -1
_SHOWN = 5  # files or rows that a sentence names

Marks = dict[str, NDArray[Any]]


def write_contents(file: Path, searches: Mapping[str, Search], digests: Mapping[str, Any]) -> None:
    """Record what each data set holds, unless `file` already records data of these digests. Raises `OSError`.

    For each file the checksum of its name, its size, its time and, up to 256 MiB of a data set, the checksum of all of
    it; for each row of an array a checksum.
    """
    text = json.dumps(digests, sort_keys=True)
    if file.is_file() and str(read_contents(file)["digests"]) == text:
        return  # data that changed since the run began without another digest would be taken for those of its beginning
    found = {f"{name}/{key}": value for name, each in searches.items() for key, value in marks(each).items()}
    with atomic_file(file) as out:
        np.savez(out, **{"digests": np.array(text), **found})  # type: ignore[arg-type]


def read_contents(file: Path) -> Marks:
    """Read what `write_contents` wrote, by data set and kind: `train/sizes`."""
    with np.load(file, allow_pickle=False) as stored:
        return dict(stored)


def marks(found: Search, read: NDArray[Any] | None = None) -> Marks:
    """Identify each file and row of a data set. `read`: which files to read, by number; None: those that are few."""
    names, sizes = relative_names(found), np.array([size for _, size, _ in found.files], np.int64)
    if read is None:
        read = np.arange(0, len(names), max(1, -(-int(sizes.sum()) // _WHOLE)))
        read = read[np.cumsum(sizes[read]) <= _WHOLE]
    contents = np.full(len(names), _UNREAD, np.int64)
    with ThreadPoolExecutor(_THREADS) as pool:
        contents[read] = list(pool.map(_checksum_of_file, [found.files[number][0] for number in read]))
    rows = {f"rows{number}": _rows(array) for number, array in enumerate(found.held) if array.nbytes <= _WHOLE}
    name_sums = np.array([zlib.crc32(os.fsencode(name)) for name in names], np.int64)
    times = np.array([time for _, _, time in found.files], np.int64)
    return {"names": name_sums, "sizes": sizes, "times": times, "contents": contents, **rows}


def compare_contents(
    file: Path, datasets: Mapping[str, Any], old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Compare data sets with the record in `file`, and their digests, `new`, with those of the run, `old`.

    Returns:
        What has changed, by the names of files and the numbers of samples; and what was not compared in full.
    """
    stored = read_contents(file) if file.is_file() else {}
    said, missing = [], []
    for name, dataset in datasets.items():
        if name not in old:
            missing.append(f"dataset.{name} (the run does not record it)")
            continue
        other, times = differences(name, old[name], new[name])
        named, unread = changed(stored, name, search(dataset)) if f"{name}/names" in stored else ([times], "")
        if not stored and old[name]["files"]:
            unread = f"dataset.{name}: all of its files (the run does not record their contents)"
        said += [text for text in named or [other] if text] or [other] * bool(other)
        missing += [text for text in (unread, *(f"dataset.{name}: {each}" for each in new[name]["unknown"])) if text]
    return said, missing


def changed(stored: Marks, name: str, found: Search) -> tuple[list[str], str]:
    """What differs in the data set `name` from its record: files and rows by name, and how far it was compared."""
    old = {key.removeprefix(f"{name}/"): value for key, value in stored.items() if key.startswith(f"{name}/")}
    now, names = marks(found, np.empty(0, np.int64)), relative_names(found)
    if not np.array_equal(old["names"], now["names"]):
        new = np.flatnonzero(~np.isin(now["names"], old["names"]))
        gone = int((~np.isin(old["names"], now["names"])).sum())
        what = [f"{_listed([names[at] for at in new])} (new)"] if len(new) else []
        what += [f"{gone} of {len(old['names'])} files gone"] if gone else []
        return [f"dataset.{name}: {'; '.join(what) or 'files in another order'}"], ""
    read = np.flatnonzero(old["contents"] != _UNREAD)
    now["contents"] = marks(found, read)["contents"]
    times = old["times"] != now["times"]
    is_copy = bool(len(times)) and bool(times.all())  # whose times say nothing
    other = (old["sizes"] != now["sizes"]) | (old["contents"] != now["contents"])
    other |= times & (old["contents"] == _UNREAD) & (not is_copy)
    said = [f"dataset.{name}: {_listed([names[at] for at in np.flatnonzero(other)])}"] if other.any() else []
    for key in sorted(key for key in old if key.startswith("rows")):
        before, after = old[key], now.get(key, np.empty(0))
        if before.shape != after.shape:
            said.append(f"dataset.{name}: an array of another size")
        elif len(bad := np.flatnonzero(before != after)):
            array = found.held[int(key.removeprefix("rows"))]
            per = -(-len(array) // _ROWS)
            shown = _listed([f"{at * per}" if per == 1 else f"{at * per} to {(at + 1) * per - 1}" for at in bad])
            said.append(f"dataset.{name}: sample {shown} (row of an array of shape {tuple(array.shape)})")
    unread = len(names) - len(read)
    how = "name and size" if is_copy else "name, size and time"
    return said, f"dataset.{name}: {unread} of {len(names)} files by {how} alone" if unread else ""


def relative_names(found: Search) -> list[str]:
    """The names of the files of a data set, from the folder that all have in common."""
    names = [path for path, _, _ in found.files]
    start = os.path.commonpath([os.path.dirname(name) for name in names]) if names else ""
    return [name[len(start) :].lstrip(os.sep) for name in names]


def _rows(array: NDArray[Any]) -> NDArray[Any]:
    per = max(1, -(-len(array) // _ROWS))
    starts = range(0, len(array), per)
    return np.array([zlib.crc32(np.ascontiguousarray(array[at : at + per]).data) for at in starts], np.uint32)


def _checksum_of_file(path: str) -> int:
    total = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(1 << 20):
                total = zlib.crc32(block, total)
    except OSError:  # reported where it is read for training
        return _UNREAD
    return total


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
