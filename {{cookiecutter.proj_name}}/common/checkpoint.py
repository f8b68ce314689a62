"""Checkpoints: one file of named parts, written so that it cannot be lost, read so that damage is noticed."""

import os
import re
import shutil
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import nn

from common.errors import UserError

FORMAT = 1
_NUMBERED = re.compile(r"step_(\d+)\.pt")


class CheckpointError(UserError):
    """A file that is not there, is damaged, or is something else than a checkpoint."""


def write_checkpoint(state: Mapping[str, Any], *paths: Path) -> None:
    """Write `state` to the first path and link it to the others, each complete or not there at all.

    Written beside, flushed to the disk, then renamed: whatever happens, the old file stays until the new one is whole.

    Raises:
        OSError: the disk is full, the folder is read-only, ...; nothing half-written is left behind.
    """
    first = paths[0]
    temporary = first.with_name(f".{first.name}.{os.getpid()}.tmp")
    try:
        # A Python file handle keeps the reason of a failure (errno); torch's own writer loses it.
        with temporary.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        for path in paths[1:]:
            _link(temporary, path)
        temporary.replace(first)
        _sync_folder(first.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # torch reports a full disk as its own error while it closes the archive; the true reason is the context.
        reason = error.__context__
        if isinstance(error, RuntimeError) and isinstance(reason, OSError):
            raise reason from error
        raise


def _link(source: Path, path: Path) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)
    try:
        os.link(source, beside)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, beside)
    beside.replace(path)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU; its checksums are verified, and nothing in it is executed.

    Raises:
        CheckpointError: it is missing, damaged (truncated, a flipped bit), or not a checkpoint of this project.
    """
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.pt")) if path.parent.is_dir() else []
        raise CheckpointError(
            f"there is no checkpoint {path}" + (f"; its folder has: {', '.join(near)}" if near else "")
        )
    try:
        with zipfile.ZipFile(path) as archive:
            # torch writes a checksum of every tensor and never looks at it again.
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path} is not a checkpoint, or was cut off while it was written or copied") from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or "model" not in state or "format" not in state:
        raise CheckpointError(f"{path} holds no checkpoint of this project (a dict with 'format', 'model', ...)")
    if state["format"] > FORMAT:
        raise CheckpointError(
            f"{path} has format {state['format']}; this code reads up to {FORMAT}: use a newer version"
        )
    return state


def load_weights(model: nn.Module, weights: Mapping[str, Any], source: str) -> None:
    """Load a state dict into the bare model, every key or none.

    Raises:
        UserError: keys are missing, left over, or of another shape; the message lists which.
    """
    own = model.state_dict()
    missing = [key for key in own if key not in weights]
    extra = [key for key in weights if key not in own]
    shapes = [
        f"{key}: {tuple(weights[key].shape)} in the file, {tuple(own[key].shape)} in the model"
        for key in own
        if key in weights and own[key].shape != weights[key].shape
    ]
    if missing or extra or shapes:
        lines = [f"{source} was made by another model than {type(model).__name__}:"]
        lines += _listing("missing in the file", missing)
        lines += _listing("not in the model", extra)
        lines += _listing("of another shape", shapes)
        raise UserError("\n".join([*lines, "  Does model.* in the config describe the model that was trained?"]))
    model.load_state_dict(weights)


def _listing(title: str, entries: list[str], limit: int = 8) -> list[str]:
    if not entries:
        return []
    more = [f"    ... and {len(entries) - limit} more"] if len(entries) > limit else []
    return [f"  {title} ({len(entries)}):", *(f"    {entry}" for entry in entries[:limit]), *more]


class CheckpointFolder:
    """The checkpoints of one run: `latest.pt`, `best.pt` and `step_<number>.pt`."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.folder = folder
        self.keep = keep

    @property
    def latest(self) -> Path:
        return self.folder / "latest.pt"

    @property
    def best(self) -> Path:
        return self.folder / "best.pt"

    def numbered(self) -> list[Path]:
        """`step_*.pt`, oldest first; by number, since dates and text order both lie."""
        found = [
            (int(match[1]), path) for path in self.folder.glob("step_*.pt") if (match := _NUMBERED.fullmatch(path.name))
        ]
        return [path for _, path in sorted(found)]

    def save(self, state: Mapping[str, Any], *, step: int | None = None, best: bool = False) -> list[Path]:
        """Write `latest.pt`, and the same file as `step_<step>.pt` and / or `best.pt`. Old numbered files go after."""
        paths = [self.latest]
        if best:
            paths.append(self.best)
        if step is not None:
            paths.append(self.folder / f"step_{step:08d}.pt")
        write_checkpoint(state, *paths)
        if step is not None and self.keep > 0:
            for old in self.numbered()[: -self.keep]:
                old.unlink(missing_ok=True)
        return paths

    def newest(self) -> "Found | None":
        """The checkpoint that got furthest and is whole; damaged ones are passed over with a warning.

        None when there is no file at all.

        Raises:
            CheckpointError: there are files, and none can be loaded.
        """
        candidates = [path for path in (self.latest, *reversed(self.numbered()), self.best) if path.is_file()]
        for path in candidates:
            try:
                return Found(path, read_checkpoint(path))
            except CheckpointError as error:
                logger.warning("{}; trying the one before", error)
        if candidates:
            raise CheckpointError(f"none of the {len(candidates)} checkpoints in {self.folder} can be loaded")
        return None


@dataclass(frozen=True)
class Found:
    """A checkpoint that was asked for: where it lies, and what it holds."""

    path: Path
    state: dict[str, Any]


def find_checkpoint(resume: str | None, own: Path) -> Found | None:
    """The checkpoint that the config's `resume` means.

    Args:
        resume: None; a file; a folder (of a run, or its checkpoints): the newest in it; "auto": the newest in `own`.
        own: the checkpoint folder of the run that is starting.

    Returns:
        None when none is asked for, or "auto" finds none because the run never saved: it starts afresh.

    Raises:
        CheckpointError: there is no such file or folder, or nothing in it can be loaded.
    """
    if resume is None:
        return None
    if resume == "auto":
        return CheckpointFolder(own).newest()
    path = Path(resume).expanduser()
    if not path.is_dir():
        return Found(path, read_checkpoint(path))
    for folder in (path / "checkpoints", path):
        if found := CheckpointFolder(folder).newest():
            return found
    raise CheckpointError(f"resume: {path} has no checkpoints (looked for *.pt in it and in {path / 'checkpoints'})")
