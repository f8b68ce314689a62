"""Samples in tar files in the layout of WebDataset: `000001.jpg`, `000001.cls`, `000001.json`, `000002.jpg`, ...

Consecutive files whose names are equal up to the first dot are one sample. The rest of the name is the kind of file.
"""

import glob
import io
import json
import os
import tarfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from loguru import logger

from common.base.errors import UserError
from common.base.files import write_text
from library.data.image_files_dataset import read_image

_INTEGERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
_TEXTS = ("txt", "text", "transcript")
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff", "gif")


class Sample(NamedTuple):
    """A sample: its name in the shard, and offset and size in bytes of its files by kind."""

    key: str
    files: dict[str, Sequence[int]]


def find_shards(data_dir: Path, pattern: str | list[str], where: str) -> list[Path]:
    """List the matching files, sorted; a list of patterns keeps its order. Relative patterns start at `data_dir`."""
    patterns = pattern
    if isinstance(patterns, str):
        patterns = [patterns]
    shards: list[Path] = []
    for text in patterns:
        found = glob.glob(os.path.join(glob.escape(str(data_dir)), text))
        if not found:
            raise UserError(f"{where}.shards: there is no file {data_dir / text}")
        shards += map(Path, sorted(found))
    return shards


def scan(shard: Path) -> list[Sample]:
    """Return the samples of a shard, reading only its headers.

    Raises `UserError` if the end is missing, or the file is no tar file.
    """
    size = shard.stat().st_size
    samples: list[Sample] = []
    with shard.open("rb") as file:
        try:
            archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - it closes nothing that `file` does not
            for member in archive:
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError("the file ends inside a sample")
                folder, name = os.path.split(member.name)
                stem, dot, kind = name.partition(".")
                if not (member.isfile() and stem and dot):  # a folder, a hidden file, or no kind
                    continue
                key = os.path.join(folder, stem)
                if not samples or samples[-1].key != key:
                    samples.append(Sample(key, {}))
                samples[-1].files[kind.lower()] = (member.offset_data, member.size)
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise tarfile.ReadError("its end is missing")
        except tarfile.TarError as error:
            raise UserError(f"{shard} is damaged: {error}; copy or pack it again") from error
    return samples


def read_index(shard: Path) -> list[Sample]:
    """Return all samples of a shard.

    They are read from `<shard>.index`, which is written first if it is missing or the shard has changed since. Several
    processes may do that at once: each replaces the whole file by the same one.
    """
    index = shard.with_name(f"{shard.name}.index")
    about = shard.stat()
    stamp = [about.st_size, about.st_mtime_ns]
    try:
        stored = json.loads(index.read_bytes())
        if stored["shard"] == stamp:
            return [Sample(*entry) for entry in stored["samples"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing, or not written by this function
    samples = scan(shard)
    try:
        write_text(index, json.dumps({"shard": stamp, "samples": samples}))
    except OSError as error:
        logger.warning("{} cannot be written, so every run reads all headers of its shard again: {}", index, error)
    return samples


class _OpenFile:
    """A file that is read by position, so processes that inherit it do not interfere."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)


_opened = lru_cache(maxsize=64)(_OpenFile)


def read_bytes(shard: Path, offset: int, size: int) -> bytes:
    """Read a part of a shard. Raises `UserError` if the shard is shorter now."""
    data = os.pread(_opened(str(shard)).number, size, offset)
    if len(data) < size:
        raise UserError(f"{shard} ends before byte {offset + size}: it was changed while this program reads it")
    return data


def decode(kind: str, data: bytes, size: list[int] | None, channels: int) -> Any:
    """Decode a file of this kind; bytes if the kind is unknown. Raises an error of `image_files_dataset.UNREADABLE`.

    An image becomes (C, H, W), float in 0..1; `size`: resized to (height, width).
    """
    last = kind.rpartition(".")[2]
    if last in _IMAGES:
        return read_image(io.BytesIO(data), size, channels).contiguous()
    if last in _INTEGERS:
        return torch.tensor(int(data))
    if last in _TEXTS:
        return data.decode()
    if last == "json":
        return json.loads(data)
    if last == "npy":
        return torch.from_numpy(np.load(io.BytesIO(data)))
    return data
