"""The large parts of a checkpoint when they are shared out among processes: each writes and reads its own shards.

They lie in a folder beside the checkpoint files, `shards/<name>/`, in the format of torch.distributed.checkpoint. The
file refers to it, and holds everything else; without the file the folder means nothing. In the file's state a tensor
that is in the shards is `{"$shard": its name there, "dtype": ..., "shape": [...]}`.
"""

import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from common.checkpoint.file import CheckpointError, sync_folder
from common.distributed import Rank, from_main, gather_objects
from common.distributed.sharded import is_sharded

FOLDER = "shards"
_MARK = "$shard"
_ALONE = Rank()
Make = Callable[[Sequence[int], torch.dtype], Tensor]


def write_shards(state: Mapping[str, Any], checkpoints: Path, step: int, rank: Rank) -> Mapping[str, Any]:
    """Write all sharded tensors in `state` below `checkpoints`. Every process must call this.

    Returns:
        `state` with references in their places, and what `check_shards` needs; `state` itself when none is sharded.

    Raises:
        OSError: some process could not write; on all of them. Nothing is left behind.
    """
    tensors: dict[str, Tensor] = {}
    left = _without_tensors(state, (), tensors, _optimizer_names(state))
    if not tensors:
        return state
    name = from_main(f"step_{step:08d}_{secrets.token_hex(4)}", rank)
    folder = checkpoints / FOLDER / name
    error = _save(tensors, folder, rank)
    digests, errors = {}, [error] if error else []
    for found in gather_objects({} if error else _own_digests(folder, rank), rank):
        if isinstance(found, str):
            errors.append(found)
        else:
            digests.update(found)
    if errors:
        if rank.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        raise OSError(errors[0])
    return {**left, "shards": {"folder": name, "files": digests}}


def check_shards(state: Mapping[str, Any], source: Path) -> None:
    """Verify that the shards which `state`, of the file `source`, refers to are all there and as they were written.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if "shards" not in state:
        return
    folder = _folder_of(state, source)
    if not folder.is_dir():
        raise CheckpointError(
            f"the shards of {source} are missing: there is no folder {folder}. A sharded checkpoint is moved with it, "
            "or made one file first: python -m common.checkpoint FILE --consolidate OUT.pt"
        )
    with ThreadPoolExecutor(4) as pool:  # hashing lets other threads run
        files = state["shards"]["files"]
        found = pool.map(_digest_or_reason, [folder / name for name in files])
    for (name, wanted), have in zip(files.items(), found, strict=True):
        if have != wanted:
            reason = have if isinstance(have, str) else "its contents are not what was written"
            raise CheckpointError(f"{source} is damaged: its shard {folder / name} cannot be used ({reason})")


def gathered(
    state: Mapping[str, Any],
    source: Path,
    make: Make | None = None,
    rank: Rank = _ALONE,
    parts: Sequence[str] | None = None,
) -> Mapping[str, Any]:
    """`state`, as read from the file `source`, with the tensors of its shards in the places of their references.

    Args:
        make: gives an empty tensor for a shape and type; None: whole ones on the CPU.
        rank: of all processes that read together, each its shards. Left out, this process reads on its own.
        parts: entries of `state` that are wanted; others with shards are left out. None: all.

    Raises:
        CheckpointError: a shard cannot be read.
    """
    if "shards" not in state:
        return state
    wanted = {name: part for name, part in state.items() if parts is None or name in parts or not _refers(part)}
    tensors: dict[str, Tensor] = {}
    whole = _with_tensors(wanted, make or _whole, tensors)
    _load(tensors, _folder_of(state, source), rank)
    return {name: part for name, part in whole.items() if name != "shards"}


class ShardFolders:
    """The shards beside the checkpoint files of one run."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._known: dict[tuple[int, int], str] = {}  # inode and time of a file -> the folder it refers to, or ""

    def drop_unused(self) -> None:
        """Remove those that no file refers to: of files that are gone, and of saves that were killed.

        Never while shards are being written: the file that refers to them comes last.
        """
        root = self._checkpoints / FOLDER
        if not root.is_dir():
            return
        try:
            used = {self._folder_of(path) for path in self._checkpoints.glob("*.pt")}
        except OSError as error:
            logger.warning("no shards are removed this time, since {} cannot be read", error.filename)
            return
        for folder in root.iterdir():
            if folder.name not in used:
                shutil.rmtree(folder, ignore_errors=True)

    def _folder_of(self, path: Path) -> str:
        stat = path.stat()
        key = (stat.st_ino, stat.st_mtime_ns)
        if key not in self._known:
            try:
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                self._known[key] = state["shards"]["folder"] if "shards" in state else ""
            except OSError:
                raise
            except Exception:  # noqa: BLE001 - damaged in whatever way, so of no use with its shards either
                self._known[key] = ""
        return self._known[key]


def _save(tensors: dict[str, Tensor], folder: Path, rank: Rank) -> str:
    """Write this process' shards. Returns what went wrong on any process, or nothing."""
    from torch.distributed.checkpoint.api import CheckpointException  # 0.6 s, for those who need it
    from torch.distributed.checkpoint.state_dict_saver import save

    from common.checkpoint.writer import ShardWriter

    try:
        save(tensors, storage_writer=ShardWriter(folder), process_group=rank.control)
    except CheckpointException as error:  # torch has told all processes
        failed, (reason, _) = next(iter(error.failures.items()))
        return f"rank {failed}: {type(reason).__name__}: {str(reason).splitlines()[0]}"
    return ""


def _own_digests(folder: Path, rank: Rank) -> dict[str, list[Any]] | str:
    """Size and SHA-256 of the files that this process wrote, the folder flushed; or what went wrong."""
    own = re.compile(rf"__{rank.rank}_\d+\.distcp")
    try:
        files = [path for path in folder.iterdir() if own.fullmatch(path.name)]
        if rank.is_main:
            files.append(folder / ".metadata")
            sync_folder(folder)
            sync_folder(folder.parent)
        return {path.name: _digest(path) for path in files}
    except OSError as error:
        return f"rank {rank.rank}: {error}"


def _digest(path: Path) -> list[Any]:
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hashed.update(block)
        size = os.fstat(file.fileno()).st_size
    return [size, hashed.hexdigest()]


def _digest_or_reason(path: Path) -> list[Any] | str:
    try:
        return _digest(path)
    except OSError as error:
        return error.strerror or str(error)


def _load(tensors: dict[str, Tensor], folder: Path, rank: Rank) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():  # torch tells that one process reads alone, which is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, storage_reader=FileSystemReader(folder), process_group=rank.control, no_dist=rank.is_alone)
    except CheckpointException as error:
        failed, (reason, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{folder} cannot be read by rank {failed}: {reason}") from error


def _folder_of(state: Mapping[str, Any], source: Path) -> Path:
    return source.parent / FOLDER / state["shards"]["folder"]


def _whole(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def _optimizer_names(state: Mapping[str, Any]) -> dict[Any, str]:
    """An optimizer numbers its parameters; in the shards they go by their names."""
    groups = state.get("optimizer", {}).get("param_groups", ())
    pairs = (zip(group["params"], group.get("param_names", ()), strict=False) for group in groups)
    return {index: name for each in pairs for index, name in each}


def _without_tensors(value: Any, path: tuple[Any, ...], taken: dict[str, Tensor], names: Mapping[Any, str]) -> Any:
    """`value` with references in the places of sharded tensors, which are collected in `taken`."""
    if is_sharded(value):
        if path[:2] == ("optimizer", "state"):
            path = ("optimizer", names[path[2]], *path[3:])
        key = ".".join(map(str, path))
        taken[key] = value.detach()
        return {_MARK: key, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {key: _without_tensors(item, (*path, key), taken, names) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_without_tensors(item, (*path, index), taken, names) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _with_tensors(value: Any, make: Make, made: dict[str, Tensor]) -> Any:
    """`value` with empty tensors in the places of references, collected in `made` to be filled."""
    if isinstance(value, Mapping):
        if _MARK in value:
            made[value[_MARK]] = make(value["shape"], getattr(torch, value["dtype"]))
            return made[value[_MARK]]
        return {key: _with_tensors(item, make, made) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_with_tensors(item, make, made) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _refers(value: Any) -> bool:
    """Whether there is a reference anywhere in `value`."""
    if isinstance(value, Mapping):
        return _MARK in value or any(map(_refers, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_refers, value))
