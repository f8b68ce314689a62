"""One checkpoint file: what it may hold, further names for it, and how it is read, with its checksums verified."""

import errno
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.base.errors import UserError
from common.config.problem import join_names

FORMAT = 1  # of the layout: raise it when the code so far would misread a new file
State = Mapping[str, Any]  # of tensors, numbers, text, and lists, tuples and dicts of these
# How PyTorch reports that the system refused to open a file, or to map it into memory.
_REFUSED = re.compile(r"unable to (open|mmap)|because of errno|can't allocate memory")


class CheckpointError(UserError):
    """A file that is missing, damaged, or not a checkpoint. A file that the system cannot read is another error."""


@contextmanager
def full_disk_named() -> Iterator[None]:
    """Raise the error of the disk, which `torch.save` replaces by its own while it closes the archive."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


@contextmanager
def linked(source: Path, path: Path) -> Iterator[None]:
    """Hold a hard link to the file `source`; after the block, it atomically replaces `path`."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)
    try:
        try:
            os.link(source.resolve(), beside)  # not a symbolic link itself
        except OSError:  # a file system without hard links
            shutil.copyfile(source, beside)
        yield
        beside.replace(path)
    finally:
        # Left over after a failure, or if `path` was the same file already, since a rename then does nothing.
        beside.unlink(missing_ok=True)


def link_file(source: Path, path: Path) -> None:
    """Link `source` as `path`, atomically; an existing file is replaced."""
    with linked(source, path):
        pass


def plain(value: Any, path: tuple[Any, ...]) -> Any:
    """`value` as a type that loads without executing code. Raises `UserError` for other types (a NumPy number)."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.detach()
    if type(value).__module__ != "numpy":
        if isinstance(value, str):
            return str.__str__(value)  # the value of an enumeration: str(value) is its name
        for kind in (bool, int, float):
            if isinstance(value, kind):
                return kind(value)
    raise UserError(
        f"{'.'.join(map(str, ('checkpoint', *path)))} is of type {type(value).__module__}.{type(value).__name__}; a "
        "checkpoint holds tensors, numbers, text, and lists, tuples and dicts of these: convert it (float(x), "
        "torch.from_numpy(x), ...) in state_dict"
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint; its checksums are verified, and no code in it is executed.

    Raises:
        CheckpointError: it is missing, damaged (truncated, a flipped bit), or not a checkpoint of this project.
        UserError: it has another format; or the system cannot read it.
    """
    state = load_archive(path)
    if not is_checkpoint(state, path):
        raise CheckpointError(
            f"{path} is not a checkpoint of this project; if it holds only weights, start a run from them: "
            f"--init_from.path {path}"
        )
    return dict(state)


def is_checkpoint(state: Any, path: Path) -> bool:
    """Return whether what was loaded from `path` is a checkpoint, not weights alone.

    Raises `UserError` for another format. The file is not damaged, so nothing falls back to an older one.
    """
    if not isinstance(state, dict) or not {"model", "format"} <= state.keys():
        return False
    if state["format"] != FORMAT:
        raise UserError(
            f"{path} has format {state['format']}, and this version of the project reads format {FORMAT}; use the code "
            "that wrote it (run.json names its commit)"
        )
    return True


def load_archive(path: Path, *, verify: bool = True) -> Any:
    """Load the object that torch saved to `path`; with `verify`, its checksums are verified.

    The tensors are mapped from the file, not read: processes on one machine share that memory, and each reads the parts
    it needs. The file must not be changed in place while they are used; replacing it is safe.

    Raises:
        CheckpointError: the file is missing or damaged, or loading it would execute code.
        UserError: the system cannot read it: nothing is known about its bytes.
    """
    damaged = None
    try:
        with zipfile.ZipFile(path) as archive:
            if verify:
                damaged = archive.testzip()  # torch writes a checksum of every tensor and never verifies it
        if damaged is None:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        others = join_names(sorted(file.name for file in path.parent.glob("*.pt")))
        raise CheckpointError(f"there is no checkpoint {path}; in {path.parent}: {others or 'none'}") from error
    except Exception as error:
        refused = _read_error(error)
        if refused:
            raise UserError(
                f"{path} cannot be read: {refused}. It may be whole, so no older checkpoint is taken in its place, and "
                "nothing was changed; repair the access and start again, or name another file: --resume FILE"
            ) from error
        said = str(error).partition("\n")[0]
        reason = f"it is not a checkpoint of torch 1.6 or later, or was truncated while written or copied ({said})"
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds Python objects, whose loading could run code; save torch.save(model.state_dict(), path)"
        raise CheckpointError(f"{path} cannot be loaded: {reason}") from error
    raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is wrong")


def _read_error(error: BaseException | None) -> str:
    """Return why the system could not read a file, whatever its bytes; "" if it could. Errors may hide one another."""
    while error is not None:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # wrong bytes lead to wrong offsets
            return str(error.strerror)
        if isinstance(error, MemoryError) or _REFUSED.search(str(error)):
            return str(error).partition("\n")[0] or "out of memory"
        error = error.__cause__ or error.__context__
    return ""


def step_of(path: Path) -> int:
    """Return the optimizer step of a checkpoint, read without its tensors; -1 if it is missing or damaged.

    Raises `UserError` if the system cannot read it.
    """
    try:
        return int(load_archive(path, verify=False)["position"]["step"])
    except (CheckpointError, LookupError, TypeError):
        return -1
