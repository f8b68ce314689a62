"""One checkpoint file: written atomically, and read with its checksums verified."""

import errno
import os
import pickle
import re
import shutil
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.base.errors import UserError
from common.base.files import atomic_file
from common.base.nested import map_leaves

FORMAT = 1  # of the layout: raise it when the code so far would misread a new file
State = Mapping[str, Any]  # of tensors, numbers, text, and lists, tuples and dicts of these
# How PyTorch reports that the system refused to open a file, or to map it into memory.
_REFUSED = re.compile(r"unable to (open|mmap)|because of errno|can't allocate memory")


class CheckpointError(UserError):
    """A file that is missing, damaged, or not a checkpoint. A file that the system cannot read is another error."""


def write_checkpoint(state: State, *paths: Path, previous: Path | None = None) -> None:
    """Write `state` to the first path and link it to the others, each complete or absent.

    Written to a temporary file, flushed to disk, then renamed: the old file stays until the new one is complete.
    Then it becomes `previous`, the fallback if the new one is damaged later: never the same file under two names.

    Raises:
        UserError: a value in it could not be loaded again with `weights_only=True`.
        OSError: the disk is full, the folder is read-only, ...; nothing half-written is left behind.
    """
    safe = map_leaves(state, plain)
    with _kept_as(paths[0], previous), atomic_file(paths[0]) as file:
        try:
            torch.save(safe, file)
        except RuntimeError as error:
            # torch reports a full disk as its own error while it closes the archive; the context has the cause.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        file.flush()
        os.fsync(file.fileno())
        for link in paths[1:]:  # hard links, before the file gets its own name
            link_file(Path(file.name), link)


@contextmanager
def _kept_as(path: Path, kept: Path | None) -> Iterator[None]:
    """Keep what `path` holds as `kept`, once the block has replaced it."""
    if kept is None or not path.is_file():
        yield
        return
    beside = _beside(kept)
    try:
        _link_or_copy(path, beside)
        yield
        beside.replace(kept)
    finally:
        beside.unlink(missing_ok=True)


def plain(value: Any, path: tuple[Any, ...]) -> Any:
    """`value` as a type that loads without executing code. Raises `UserError` for other types (a NumPy number)."""
    if value is None:
        return None
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


def link_file(source: Path, path: Path) -> None:
    """Link `source` as `path`, atomically; an existing file is replaced."""
    beside = _beside(path)
    try:
        _link_or_copy(source, beside)
        beside.replace(path)
    finally:
        # Left over after a failure, or if `path` was the same file already, since a rename then does nothing.
        beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _link_or_copy(source: Path, path: Path) -> None:
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint; its checksums are verified, and no code in it is executed.

    Raises:
        CheckpointError: it is missing, damaged (truncated, a flipped bit), or not a checkpoint of this project.
        UserError: it has another format; or the system cannot read it.
    """
    state = load_archive(path)
    if not is_checkpoint(state):
        raise CheckpointError(
            f"{path} is not a checkpoint of this project; if it holds only weights, start a run from them: "
            f"--init_from.path {path}"
        )
    check_format(state, path)
    return dict(state)


def check_format(state: State, path: Path) -> None:
    """Raise `UserError` for another format. The file is not damaged, so nothing falls back to an older one."""
    if state["format"] != FORMAT:
        raise UserError(
            f"{path} has format {state['format']}, and this version of the project reads format {FORMAT}; use the code "
            "that wrote it (run.json names its commit)"
        )


def is_checkpoint(state: Any) -> bool:
    """Return whether a loaded object is a checkpoint, not weights alone."""
    return isinstance(state, dict) and "model" in state and "format" in state


def load_archive(path: Path) -> Any:
    """Load the object that torch saved to `path`, its checksums verified.

    The tensors are mapped from the file, not read: processes on one machine share that memory, and each reads the parts
    it needs. The file must not be changed in place while they are used; replacing it is safe.

    Raises:
        CheckpointError: the file is missing or damaged, or loading it would execute code.
        UserError: the system cannot read it: nothing is known about its bytes.
    """
    if not _is_there(path):
        text = f"there is no checkpoint {path}"
        if path.is_dir():
            text = f"there is no checkpoint in {path}"
        beside = sorted(file.name for file in path.parent.glob("*.pt"))
        if beside:
            text += f"; its folder has: {', '.join(beside)}"
        raise CheckpointError(text)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch writes a checksum of every tensor and never verifies it
        if damaged is None:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        refused = _read_error(error)
        if refused:
            raise unreadable(path, refused) from error
        reason = f"it is not a checkpoint, or was truncated while being written or copied ({error})".partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds Python objects, whose loading could run code; save torch.save(model.state_dict(), path)"
        raise CheckpointError(f"{path} cannot be loaded: {reason}") from error
    raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is wrong")


def _is_there(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(path, str(error.strerror)) from error


def _read_error(error: BaseException | None) -> str:
    """Return why the system could not read a file, whatever its bytes; "" if it could. Errors may hide one another."""
    while error is not None:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # wrong bytes lead to wrong offsets
            return str(error.strerror)
        if isinstance(error, MemoryError) or _REFUSED.search(str(error)):
            return str(error).partition("\n")[0] or "out of memory"
        error = error.__cause__ or error.__context__
    return ""


def unreadable(path: Path, reason: str) -> UserError:
    """Return the error for a file or folder that may be whole, but cannot be read now."""
    return UserError(
        f"{path} cannot be read: {reason}. It may be whole, so no older checkpoint is taken in its place, and nothing "
        "was changed; repair the access and start again, or name another file: --resume FILE"
    )


def step_of(path: Path) -> int:
    """Return the optimizer step of a checkpoint, read without its tensors; -1 if it is missing or damaged.

    Raises `UserError` if the system cannot read it.
    """
    if not _is_there(path):
        return -1
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return int(state["position"]["step"])
    except Exception as error:  # damaged in any way; `load_archive` says how
        refused = _read_error(error)
        if refused:
            raise unreadable(path, refused) from error
        return -1
