"""The large parts of a checkpoint when they are shared out among processes: each writes and reads its own shards.

They lie in a folder beside the checkpoint files, `shards/<name>/`, in the format of torch.distributed.checkpoint. The
file refers to it, and holds everything else; without the file the folder means nothing. In the place of a tensor that
lies in the shards the file has a meta tensor: shape and type without numbers. Its path in the state is its name there.
"""

import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from common.checkpoint.file import CheckpointError, map_leaves, read_file, sync_folder
from common.distributed import Rank, from_main, gather_objects
from common.distributed.sharded import is_sharded

FOLDER = "shards"
_ALONE = Rank()
Make = Callable[..., Tensor]


def read_checkpoint(path: Path, *, whole: bool = True) -> dict[str, Any]:
    """Read a checkpoint to the CPU. Everything is verified, the shards of a sharded one too.

    Args:
        whole: put a sharded one together; false leaves its tensors in the shards.

    Raises:
        CheckpointError: it is missing, damaged (truncated, a flipped bit), or not a checkpoint of this project.
    """
    state = read_file(path)
    check_shards(state, path)
    return dict(gathered(state, path)) if whole else state


def write_shards(state: Mapping[str, Any], checkpoints: Path, step: int, rank: Rank) -> Mapping[str, Any]:
    """Write all sharded tensors in `state` below `checkpoints`. Every process must call this.

    Returns:
        `state` with meta tensors in their places, and what `check_shards` needs; `state` itself when none is sharded.

    Raises:
        OSError: some process could not write; on all of them. Nothing is left behind.
    """
    tensors: dict[str, Tensor] = {}

    def take(value: Any, path: tuple[Any, ...]) -> Any:
        if not is_sharded(value):
            return value
        tensors[_name(path)] = value.detach()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    left = map_leaves(state, take)
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
    make: Make = torch.empty,
    rank: Rank = _ALONE,
    without: Collection[str] = (),
) -> Mapping[str, Any]:
    """`state`, as read from the file `source`, with the tensors of its shards in their places.

    Args:
        make: gives an empty tensor for a shape and `dtype`; by default whole ones on the CPU.
        rank: of all processes that read together, each its shards. Left out, this process reads on its own.
        without: entries of a sharded state to leave out.

    Raises:
        CheckpointError: a shard cannot be read.
    """
    if "shards" not in state:
        return state
    tensors: dict[str, Tensor] = {}

    def fill(value: Any, path: tuple[Any, ...]) -> Any:
        if not (isinstance(value, Tensor) and value.is_meta):
            return value
        return tensors.setdefault(_name(path), make(value.shape, dtype=value.dtype))

    whole = {name: map_leaves(part, fill, (name,)) for name, part in state.items() if name not in ("shards", *without)}
    _load(tensors, _folder_of(state, source), rank)
    return whole


def drop_unused_shards(checkpoints: Path) -> None:
    """Remove shards that no file refers to: of files that are gone, and of saves that were killed.

    Never while shards are being written: the file that refers to them comes last.
    """
    root = checkpoints / FOLDER
    if not root.is_dir():
        return
    try:
        stats = [(path, path.stat()) for path in checkpoints.glob("*.pt")]
        used = {_folder_name(path, stat.st_ino, stat.st_mtime_ns) for path, stat in stats}
    except OSError as error:
        logger.warning("no shards are removed this time, since {} cannot be read", error.filename)
        return
    for folder in root.iterdir():
        if folder.name not in used:
            shutil.rmtree(folder, ignore_errors=True)


@cache
def _folder_name(path: Path, inode: int, modified_ns: int) -> str:
    """The shards folder that a checkpoint file refers to, or "". A file that is replaced is read again."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return str(state["shards"]["folder"]) if "shards" in state else ""
    except OSError:
        raise
    except Exception:  # noqa: BLE001 - damaged in any way, so of no use with its shards either
        return ""


def _save(tensors: dict[str, Tensor], folder: Path, rank: Rank) -> str:
    """Write this process' shards. Returns what went wrong on any process, or nothing."""
    from torch.distributed.checkpoint.api import CheckpointException  # 0.6 s, for those who need it
    from torch.distributed.checkpoint.state_dict_saver import save

    from common.checkpoint.writer import ShardWriter

    try:
        save(tensors, storage_writer=ShardWriter(folder), process_group=rank.control)
    except CheckpointException as error:  # on all processes
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
        with warnings.catch_warnings():  # torch warns that one process reads alone, as intended
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(tensors, storage_reader=FileSystemReader(folder), process_group=rank.control, no_dist=rank.is_alone)
    except CheckpointException as error:
        failed, (reason, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{folder} cannot be read by rank {failed}: {reason}") from error


def _folder_of(state: Mapping[str, Any], source: Path) -> Path:
    return source.parent / FOLDER / state["shards"]["folder"]


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
