"""One checkpoint file: written so that it cannot be lost, read so that damage is noticed."""

import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from common.base.errors import UserError

FORMAT = 1


class CheckpointError(UserError):
    """A file that is not there, is damaged, or is something else than a checkpoint."""


def write_checkpoint(state: Mapping[str, Any], *paths: Path) -> None:
    """Write `state` to the first path and link it to the others, each complete or not there at all.

    Written beside, flushed to the disk, then renamed: whatever happens, the old file stays until the new one is whole.

    Raises:
        UserError: something in it could not be loaded again with `weights_only=True`.
        OSError: the disk is full, the folder is read-only, ...; nothing half-written is left behind.
    """
    safe = map_leaves(state, _plain)
    write_file(paths[0], lambda file: torch.save(safe, file), links=paths[1:])


def map_leaves(value: Any, function: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """`value`, of nested dicts, lists and tuples, with `function(leaf, path)` in the place of every leaf and key.

    `path` holds the keys and indices that lead there. Subclasses (OrderedDict, named tuples) become plain types.
    """
    if isinstance(value, Mapping):
        items = ((key, item, (*path, key)) for key, item in value.items())
        return {function(key, below): map_leaves(item, function, below) for key, item, below in items}
    if isinstance(value, (list, tuple)):
        mapped = [map_leaves(item, function, (*path, index)) for index, item in enumerate(value)]
        return tuple(mapped) if isinstance(value, tuple) else mapped
    return function(value, path)


def _plain(value: Any, path: tuple[Any, ...]) -> Any:
    """`value` as a type that loads without executing anything. Raises `UserError` for others (a NumPy number)."""
    if value is None or type(value) in (bool, int, float, str, Tensor):
        return value
    if isinstance(value, Tensor):
        return value.detach()
    for kind in (bool, int, float, str):
        if isinstance(value, kind) and type(value).__module__ != "numpy":
            return kind(value)
    raise UserError(
        f"{'.'.join(map(str, ('checkpoint', *path)))} is of type {type(value).__module__}.{type(value).__name__}; a "
        "checkpoint holds tensors, numbers, text, and lists, tuples and dicts of these: convert it (float(x), "
        "torch.from_numpy(x), ...) in state_dict"
    )


def write_file(path: Path, write: Callable[[BinaryIO], Any], links: Sequence[Path] = ()) -> None:
    """Let `write` fill a file that appears as `path`, and under the names of `links`, when it is complete.

    Raises:
        OSError: it cannot be written; nothing half-written is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # A Python file handle keeps the reason of a failure (errno); torch's own writer loses it.
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        for link in links:
            link_file(temporary, link)
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # torch reports a full disk (or Ctrl-C) as its own error while it closes the archive; the context is the reason.
        reason = error.__context__
        if isinstance(error, RuntimeError) and isinstance(reason, (OSError, KeyboardInterrupt)):
            raise reason from error
        raise


def link_file(source: Path, path: Path) -> None:
    """Give `source` a second name, in one move; a file that had the name is replaced."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)
    try:
        try:
            os.link(source, beside)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, beside)
        beside.replace(path)
    finally:
        # Left over after a failure; and when `path` was this very file already, since a rename then does nothing.
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk: a file that was flushed may still lose its name."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_file(path: Path) -> dict[str, Any]:
    """Read a checkpoint's file to the CPU; its checksums are verified, and nothing in it is executed.

    Raises:
        CheckpointError: it is missing, damaged (truncated, a flipped bit), or not a checkpoint of this project.
    """
    state = load_archive(path)
    if not is_checkpoint(state):
        raise CheckpointError(f"{path} holds no checkpoint of this project (a dict with 'format', 'model', ...)")
    if state["format"] > FORMAT:
        raise CheckpointError(
            f"{path} has format {state['format']}; this code reads up to {FORMAT}: use a newer version"
        )
    return dict(state)


def is_checkpoint(state: Any) -> bool:
    """Whether something that was loaded is a checkpoint, not a file of weights."""
    return isinstance(state, dict) and "model" in state and "format" in state


def load_archive(path: Path) -> Any:
    """What torch wrote to `path`, with its checksums verified. Raises `CheckpointError`."""
    _check_archive(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error


def _check_archive(path: Path) -> None:
    """Verify the checksums of a file that torch wrote. Raises `CheckpointError` when it is missing or damaged."""
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.pt")) if path.parent.is_dir() else []
        there = f"; its folder has: {', '.join(near)}" if near else ""
        raise CheckpointError(f"there is no checkpoint {path}{there}")
    try:
        with zipfile.ZipFile(path) as archive:
            # torch writes a checksum of every tensor and never looks at it again.
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError) as error:
        reason = "is not a checkpoint, or was cut off while it was written or copied"
        raise CheckpointError(f"{path} {reason} ({error})") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is wrong")


def step_of(path: Path) -> int:
    """The optimizer step of a checkpoint, read without its tensors; -1 when even that cannot be read."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return int(state["position"]["step"])
    except Exception:  # noqa: BLE001 - damaged in any way; `read_file` says how
        return -1
