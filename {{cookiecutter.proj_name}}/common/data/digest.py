"""Identify the data of a run: computed at every start, so that a resume notices data that changed meanwhile."""

import os
import stat
import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from loguru import logger
from torch import Tensor

from common.data.view import kind_of

_SETTING = 16  # fewer values than this in an attribute are a setting of the dataset, not its data
_PROBED = 64  # strings of an attribute that are looked up: if none of them is a file, none of the others is
_DEPTH = 8  # of lists in lists
_OPENED, _READ = 64, 1 << 16  # files that are opened, evenly spread, and bytes read of each: noise is not missed
_THREADS, _CHUNK = 16, 1000  # a network file system answers many requests at once

_File = tuple[str, int, int]  # path, size in bytes, time of the last change in ns


def digest(dataset: Any) -> dict[str, Any]:
    """Return a short description of a dataset that differs if the data do; plain values.

    It is made of what the dataset's own `digest()` returns; without one, of its attributes and the datasets inside
    it: names, sizes and times of files, the beginnings of a few, and checksums of arrays, tensors and lists. A million
    files take seconds. Their names count from the folder that all have in common.

    Returns:
        `files`, `arrays`, `values`, `digests`: how many there are of each; `names`, `times`, `contents`: checksums of
        the files' names and sizes, of their times, and of all that was read; `unknown`: what cannot be compared.
    """
    held = search(dataset)
    sizes = array("q", [size for _, size, _ in held.files]).tobytes()
    counts = {name: len(getattr(held, name)) for name in ("files", "arrays", "digests")} | {"values": held.values}
    beginnings = _beginnings([path for path, _, _ in held.files])
    return {
        **counts,
        "names": _checksum(sizes + "\n".join(held.names()).encode(errors="surrogateescape")),
        "times": _checksum(array("q", [time for _, _, time in held.files]).tobytes()),
        "contents": _checksum(repr((held.arrays, held.digests, held.sums, beginnings)).encode()),
        "unknown": held.unknown if any(counts.values()) else [f"{kind_of(dataset)} has no digest()"],
    }


def search(dataset: Any) -> "Search":
    """Look for what a dataset holds; it holds nothing, with a warning, if its class raises an error."""
    held = Search()
    try:
        held.dataset(dataset)
    except Exception as error:  # noqa: BLE001 - classes of others can raise anything, and training needs no digest
        logger.warning("{} has no digest, so a resume will not compare its data: {!r}", kind_of(dataset), error)
        held = Search()
    return held


def differences(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str]:
    """Return how data differ from an earlier start's: what surely changed, and what may have; "" for nothing."""
    if any(old[key] != new[key] for key in ("files", "names", "contents")):
        before, after = describe_counts([old]), describe_counts([new])
        return f"dataset.{name}: different data ({after if before == after else f'{before} -> {after}'})", ""
    if old["times"] != new["times"]:
        return "", f"dataset.{name}: different times of {new['files']} files, whose names and sizes are unchanged"
    return "", ""


def describe_counts(digests: Iterable[Mapping[str, Any]]) -> str:
    """Return how much the digests describe, in words: `240 files, 2 arrays`."""
    digests = list(digests)
    sums = {name: sum(counts[name] for counts in digests) for name in ("files", "arrays", "values", "digests")}
    return ", ".join(f"{n} {name if n > 1 else name[:-1]}" for name, n in sums.items() if n)


class Search:
    """Collects what datasets hold.

    Attributes:
        files: path, size in bytes and time of the last change, in ns, of each.
        arrays: shape, type and checksum of each.
        held: the same arrays, not copied.
        values: numbers and strings in lists.
        sums: checksums of these lists.
        digests: what datasets returned as their digest.
        unknown: what cannot be compared.
    """

    def __init__(self) -> None:
        self.files: list[_File] = []
        self.arrays: list[tuple[tuple[int, ...], str, int]] = []
        self.held: list[np.ndarray[Any, Any]] = []
        self.digests: list[str] = []
        self.sums: list[int] = []
        self.unknown: list[str] = []
        self.values = 0
        self._seen: set[int] = set()

    def names(self) -> list[str]:
        """Return the names of the files, from the folder that all have in common."""
        paths = [path for path, _, _ in self.files]
        # Names in between share what the first and the last in alphabetical order have in common.
        start = len(os.path.commonpath([os.path.dirname(path) for path in (min(paths), max(paths))])) if paths else 0
        return [path[start:] for path in paths]

    def dataset(self, dataset: Any) -> None:
        """Search a dataset: what its own digest returns, what Hugging Face's keeps, or else its attributes."""
        fingerprint = getattr(dataset, "_fingerprint", None)  # of Hugging Face: of the table and all changes made to it
        # Looked up in the class: a dataset around another one passes on the methods of the inner one.
        if callable(getattr(type(dataset), "digest", None)):
            fingerprint = dataset.digest()
        elif isinstance(fingerprint, str):
            self.attribute([file["filename"] for file in getattr(dataset, "cache_files", ())])
        if isinstance(fingerprint, str):
            self.digests.append(fingerprint)
        elif fingerprint is not None:
            self.attribute(fingerprint, least=1)
        else:
            self._attributes(dataset)

    def _attributes(self, dataset: Any) -> None:
        held = vars(dataset) if hasattr(dataset, "__dict__") else {"": dataset}
        paths = [os.fspath(value) for value in held.values() if isinstance(value, (str, os.PathLike))]
        folders = [path for path in paths if os.path.isabs(path) and os.path.isdir(path)]
        files, arrays = len(self.files), len(self.arrays)
        for file in held.values():
            if id(file) not in self._seen:  # under another name
                self._seen.add(id(file))
                self.attribute(file, folders)
        if len(self.files) > files or any(len(shape) > 1 for shape, *_ in self.arrays[arrays:]):
            return
        # It holds labels at most, so its samples are elsewhere.
        if callable(getattr(type(dataset), "sample_ids", None)):
            self.attribute(list(dataset.sample_ids()), folders)
        if folders and len(self.files) == files:
            self.unknown.append(f"files in {', '.join(folders)}, since {kind_of(dataset)} has no digest()")

    def attribute(self, value: Any, folders: Sequence[str] = (), least: int = _SETTING) -> None:
        """Search one attribute. Relative names of files are those in `folders`; fewer values than `least` are none."""
        leaves: list[Any] = []
        self._collect(value, leaves, _DEPTH)
        names = [leaf for leaf in leaves if isinstance(leaf, str)]
        probed = names[:_PROBED] + names[:: len(names) // _PROBED + 1]
        files = _files(names, folders) if _stats(probed, folders) else {}
        self.files += files.values()
        rest = [leaf for leaf in leaves if leaf not in files] if files else leaves
        if len(rest) >= least:
            self.values += len(rest)
            self.sums.append(0)
            for first in range(0, len(rest), _CHUNK):  # never a copy of everything
                text = repr(rest[first : first + _CHUNK])
                self.sums[-1] = zlib.crc32(text.encode(errors="surrogateescape"), self.sums[-1])

    def _collect(self, value: Any, leaves: list[Any], depth: int) -> None:
        """Append the strings and numbers in `value` to `leaves`; note arrays, and search datasets."""
        if value is None or isinstance(value, (str, int, float, bytes, range)):
            leaves.append(value)
        elif isinstance(value, os.PathLike):
            leaves.append(os.fspath(value))
        elif isinstance(value, (tuple, list, deque, array, Set, Mapping)):
            items = chain.from_iterable(value.items()) if isinstance(value, Mapping) else value
            for item in (sorted(items, key=repr) if isinstance(value, Set) else items) if depth else ():
                self._collect(item, leaves, depth - 1)
        elif isinstance(value, Tensor) and value.layout == torch.strided:
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            self._note(data, tuple(value.shape), str(value.dtype))
        elif isinstance(value, np.ndarray):
            self._array(value, leaves, depth)
        elif callable(getattr(value, "to_numpy", None)):  # a table of pandas, polars or Arrow
            self._collect(value.to_numpy(), leaves, depth)
        elif isinstance(getattr(value, "filename", None), (str, os.PathLike)):  # an open file of HDF5, zip, ...
            leaves.append(os.fspath(value.filename))
        elif any(hasattr(type(value), name) for name in ("__getitem__", "__iter__")):
            self.dataset(value)

    def _array(self, value: np.ndarray[Any, Any], leaves: list[Any], depth: int) -> None:
        source: Any = value
        while isinstance(source, np.ndarray) and not isinstance(source, np.memmap):
            source = source.base
        if name := getattr(source, "filename", None):  # mapped: reading it all could take hours
            leaves.append(os.fspath(name))
        elif value.dtype.hasobject or value.dtype.kind in "US":
            self._collect(value.ravel().tolist(), leaves, depth)
        else:
            self._note(np.ascontiguousarray(value).reshape(-1).view(np.uint8), value.shape, str(value.dtype))

    def _note(self, data: np.ndarray[Any, Any], shape: tuple[int, ...], kind: str) -> None:
        """Note an array by its bytes."""
        self.arrays.append((shape, kind, zlib.crc32(data.data)))
        self.held.append(data.reshape(shape[0] if shape else 1, -1) if data.size else data)


def _files(names: Sequence[str], folders: Sequence[str]) -> dict[str, _File]:
    """Return the files among `names`, by name, many at a time."""
    chunks = [names[first : first + _CHUNK] for first in range(0, len(names), _CHUNK)]
    with ThreadPoolExecutor(_THREADS) as pool:
        return {name: file for part in pool.map(_stats, chunks, repeat(folders)) for name, file in part.items()}


def _stats(names: Sequence[str], folders: Sequence[str]) -> dict[str, _File]:
    """Return the files among `names`, by name.

    Relative ones are in `folders`, or if they name a folder, where we are.
    """
    stats = {}
    for name in names:
        if name.startswith(os.sep):
            paths = [name]
        else:
            paths = [os.path.abspath(name)] if os.sep in name else []
            paths += [os.path.join(folder, name) for folder in folders]
        for path in paths:
            try:
                about = os.stat(path)
            except (OSError, ValueError):  # not a path: too long, or with a null character
                continue
            if stat.S_ISREG(about.st_mode):
                stats[name] = (path, about.st_size, about.st_mtime_ns)
                break
    return stats


def _beginnings(paths: Sequence[str]) -> list[int]:
    """Checksums of the beginnings of some files."""
    sums = []
    for path in paths[:: -(-len(paths) // _OPENED) or 1]:
        with suppress(OSError), open(path, "rb", buffering=0) as file:  # one that may not be read is reported later
            sums.append(zlib.crc32(file.read(_READ)))
    return sums


def _checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
