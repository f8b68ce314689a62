"""The checkpoints of one run: written atomically; which are kept, and which to resume from."""

import os
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loguru import logger

from common.base.files import atomic_file, unused_path
from common.base.nested import map_leaves
from common.checkpoint.file import (
    CheckpointError,
    State,
    full_disk_named,
    link_file,
    linked,
    plain,
    read_checkpoint,
    step_of,
)
from common.distributed import Rank, from_main

_NUMBERED = re.compile(r"step_\d+\.pt")


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that a run starts from."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.state["position"]["step"])


class CheckpointFolder:
    """`latest.pt`, the one before it as `previous.pt`, `best.pt`, and `step_<number>.pt`.

    Args:
        keep: numbered files to keep, the newest ones; 0 keeps all.

    Attributes:
        source: the checkpoint that the run continues from, which may lie elsewhere.
        after_write: functions to call with each file that was written, and its step, from the thread that writes.
    """

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.keep = keep
        self.source: Path | None = None
        self.after_write: list[Callable[..., object]] = []
        self.folder = folder
        self.latest = folder / "latest.pt"
        self.previous = folder / "previous.pt"
        self.best = folder / "best.pt"

    @property
    def last_good(self) -> str:
        """Name the checkpoint to go back to, for messages."""
        if os.path.isfile(self.latest):  # which never raises
            return f"the last good checkpoint is {self.latest}"
        return f"there is no {self.latest}"

    def files(self) -> list[Path]:
        """Return the files that exist, `latest.pt` first and the newest numbered one last.

        Raises `OSError` if the folder cannot be read.
        """
        try:
            names = os.listdir(self.folder)  # unlike glob, it fails if the folder cannot be read
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [path for path in (self.latest, self.previous, self.best) if path.name in names]
        numbered = [self.folder / name for name in names if _NUMBERED.fullmatch(name)]
        return found + sorted(numbered, key=lambda path: int(path.stem[5:]))

    def save(self, state: State, *, numbered: bool = False, best: bool = False) -> None:
        """Write `latest.pt`, and link it as `best.pt` and `step_<number>.pt` if requested. Then delete old files.

        Written to a temporary file, flushed to disk, then renamed: the old file stays until the new one is complete.
        Then it becomes `previous.pt`, the fallback if the new one is damaged later: never one file under both names.

        Raises:
            UserError: a value in it could not be loaded again with `weights_only=True`.
            OSError: the disk is full, the folder is read-only, ...; nothing half-written is left behind.
        """
        began = time.monotonic()
        step = state["position"]["step"]
        safe = map_leaves(state, plain)
        self.folder.mkdir(exist_ok=True)  # it may have been moved or deleted
        paths = [self.latest]
        if best:
            paths.append(self.best)
        if numbered:
            paths.append(self.folder / f"step_{step:08d}.pt")
        kept: AbstractContextManager[None] = nullcontext()
        if self.latest.is_file():
            kept = linked(self.latest, self.previous)
        with kept, atomic_file(self.latest) as file:
            with full_disk_named():
                torch.save(safe, file)
            file.flush()
            os.fsync(file.fileno())
            for path in paths[1:]:  # hard links to the temporary file, before it becomes latest.pt
                link_file(Path(file.name), path)
        if numbered and self.keep:
            all_numbered = [path for path in self.files() if _NUMBERED.fullmatch(path.name)]
            for path in all_numbered[: -self.keep]:
                path.unlink(missing_ok=True)
        for path in paths:
            for function in self.after_write:
                function(path, step)
        names = ", ".join(path.name for path in paths)
        level = "DEBUG"  # latest.pt alone is no news, with a line for each epoch
        if len(paths) > 1:
            level = "INFO"
        logger.log(level, "saved {} (step {}, {:.2f} s)", names, step, time.monotonic() - began)

    def rewind_to(self, checkpoint: Path, at: int) -> None:
        """Make `checkpoint`, of step `at`, the latest; later ones are renamed to `abandoned_...`, and never deleted.

        Otherwise the later files would count as the newest: a run killed before its next save would resume from them.
        A damaged `latest.pt` is renamed too. Raises `UserError` if one of the files cannot be read.
        """
        for path in self.files():
            step = step_of(path)
            is_replaced = path == self.latest or step > at
            is_source = path.exists() and path.samefile(checkpoint)  # a link may lead nowhere
            if is_replaced and not is_source:
                kept = unused_path(path.with_name(f"abandoned_{path.stem}"), path.suffix)
                logger.warning("{} (step {}) is not the checkpoint being resumed; renamed to {}", path, step, kept.name)
                path.replace(kept)
        if self.latest.exists():
            return
        if self.previous.is_file() and self.previous.samefile(checkpoint):
            self.previous.replace(self.latest)  # a link would make both the same file
        else:
            link_file(checkpoint, self.latest)

    def find_best(self, step: int, source: Path) -> None:
        """Link the best checkpoint so far, of `step`, as `best.pt` after a resume from `source`."""
        if step_of(self.best) == step:
            return
        for path in (source, *CheckpointFolder(source.parent).files()):
            if step_of(path) == step:
                link_file(path, self.best)
                return
        logger.warning("there is no checkpoint of step {}, the best so far", step)

    def clean(self) -> None:
        """Remove the unfinished files of a killed process. Only for the process that holds the run's lock."""
        for path in self.folder.glob(".*.tmp"):
            logger.warning("removing {}, which was never finished", path)
            path.unlink(missing_ok=True)

    def newest(self) -> LoadedCheckpoint | None:
        """Return the newest checkpoint that can be loaded; damaged ones are skipped with a warning.

        None when there is no file at all.

        Raises:
            CheckpointError: there are files, and all are damaged.
            UserError: the system cannot read a file: whether an older one should be used is unknown.
        """
        paths = self.files()
        paths.sort(key=lambda path: (path == self.latest, step_of(path)), reverse=True)
        for path in paths:
            try:
                checkpoint = LoadedCheckpoint(path, read_checkpoint(path))
            except CheckpointError as error:
                logger.warning("{}; trying the one before it", error)
                continue
            if path != self.latest:
                logger.warning("using {}, step {}", path, checkpoint.step)
            return checkpoint
        if paths:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} can be loaded; to start again give the run another --name, "
                "or omit --resume; the existing folder will be renamed"
            )
        return None


def best_in(name: str | Path) -> Path:
    """Return a run's best checkpoint, given its folder or checkpoint folder; the latest without one; a file as is."""
    path = Path(name).expanduser()
    for file in ("best.pt", "latest.pt"):
        for folder in (path / "checkpoints", path):
            if (folder / file).is_file():
                return folder / file
    return path


def find_checkpoint(resume: str | None, own_folder: Path, rank: Rank) -> LoadedCheckpoint | None:
    """Load the checkpoint that the config's `resume` names. Every process must call this: the main one chooses.

    Args:
        resume: None; a file; a folder (of a run, or its checkpoints): the newest in it; "auto": that of `own_folder`.
        own_folder: the checkpoint folder of the run that is starting.

    Returns:
        None if `resume` is None, or "auto" and the run has saved nothing yet: it then starts from the beginning.

    Raises:
        CheckpointError: there is no such file or folder, or nothing in it can be loaded.
    """
    if resume is None:
        return None
    checkpoint = None
    if rank.is_main:
        checkpoint = _find(resume, own_folder)
    path = from_main(getattr(checkpoint, "path", None), rank)  # every process
    if checkpoint is None and path is not None:
        checkpoint = LoadedCheckpoint(path, read_checkpoint(path))
    return checkpoint


def _find(resume: str, own_folder: Path) -> LoadedCheckpoint | None:
    if resume == "auto":
        return CheckpointFolder(own_folder).newest()
    path = Path(resume).expanduser()
    for folder in (path / "checkpoints", path):
        checkpoint = CheckpointFolder(folder).newest()
        if checkpoint is not None:
            return checkpoint
    return LoadedCheckpoint(path, read_checkpoint(path))
