"""The checkpoints of one run: which are kept, and which to resume from."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from common.base.files import unused_path, without_tilde
from common.checkpoint.file import (
    CheckpointError,
    State,
    link_file,
    read_checkpoint,
    step_of,
    unreadable,
    write_checkpoint,
)
from common.distributed import Rank, from_main

_NUMBERED = re.compile(r"step_(\d+)\.pt")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that a run starts from: its file, its state, and the newer files whose bytes are wrong."""

    path: Path
    state: dict[str, Any]
    damaged: tuple[Path, ...] = ()

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
        has_saved: whether this run has written one.
    """

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.keep = keep
        self.source: Path | None = None
        self.has_saved = False
        self.move_to(folder)

    def move_to(self, folder: Path) -> None:
        """Use another folder from now on."""
        self.folder = folder
        self.latest = folder / "latest.pt"
        self.previous = folder / "previous.pt"
        self.best = folder / "best.pt"

    @property
    def last_good(self) -> str:
        """Name the checkpoint to go back to, for messages."""
        if self.latest.is_file():
            return f"the last good checkpoint is {self.latest}"
        if self.has_saved:
            return "what this run has saved was moved or deleted"
        return "there is no checkpoint yet"

    def numbered_files(self) -> list[tuple[int, Path]]:
        """Step and file of each `step_*.pt`, oldest first; by number, since dates and text order are unreliable."""
        found = []
        for name in self._names():
            match = _NUMBERED.fullmatch(name)
            if match:
                found.append((int(match[1]), self.folder / name))
        return sorted(found)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.folder)  # unlike glob, it fails if the folder cannot be read
        except (FileNotFoundError, NotADirectoryError):
            return []

    def older(self) -> list[Path]:
        """Return the paths beside `latest.pt`, whether there are such files or not."""
        numbered = [path for _, path in self.numbered_files()]
        return [self.previous, self.best, *numbered]

    def save(self, state: State, *, step: int | None = None, best: bool = False) -> list[Path]:
        """Write `latest.pt`, and the same file as `step_<step>.pt` and / or `best.pt`. Then delete old files."""
        paths = [self.latest]
        if best:
            paths.append(self.best)
        if step is not None:
            paths.append(self.folder / f"step_{step:08d}.pt")
        write_checkpoint(state, *paths, previous=self.previous)
        self.has_saved = True
        if step is not None and self.keep:
            for _, path in self.numbered_files()[: -self.keep]:
                path.unlink(missing_ok=True)
        return paths

    def rewind_to(self, checkpoint: LoadedCheckpoint) -> None:
        """Make `checkpoint`, of this run, the latest; later ones are renamed to `abandoned_...`, and never deleted.

        Otherwise the later files would count as the newest: a run killed before its next save would resume from them.
        Damaged ones are renamed to `damaged_...`. Raises `UserError` if one of the files cannot be read.
        """
        is_latest = self.latest.is_file() and self.latest.samefile(checkpoint.path)
        others = self.older()
        if not is_latest:
            others.append(self.latest)
        for path in others:  # what is newer than the file being resumed is renamed; then that file is latest.pt
            step = step_of(path)
            is_replaced = path == self.latest and path.exists()
            if path in checkpoint.damaged or (is_replaced and step < 0):
                self._set_aside(path, "damaged", "is damaged")
            elif is_replaced or step > checkpoint.step:
                self._set_aside(path, "abandoned", f"(step {step}) is not the checkpoint being resumed")
        if is_latest:
            return
        if self.previous.is_file() and self.previous.samefile(checkpoint.path):
            self.previous.replace(self.latest)  # a link would make both the same file
        else:
            link_file(checkpoint.path, self.latest)

    def _set_aside(self, path: Path, why: str, said: str) -> None:
        kept = unused_path(path.with_name(f"{why}_{path.stem}"), path.suffix)
        logger.warning("{} {}; renamed to {}", path, said, kept.name)
        path.replace(kept)

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
            UserError: the system cannot read a file or the folder: whether an older one should be used is unknown.
        """
        damaged = list[Path]()
        try:
            for path in self._newest_first():
                try:
                    checkpoint = LoadedCheckpoint(path, read_checkpoint(path), tuple(damaged))
                except CheckpointError as error:
                    logger.warning("{}; trying the one before it", error)
                    damaged.append(path)
                    continue
                if path != self.latest:
                    logger.warning("using {}, step {}", path, checkpoint.step)
                return checkpoint
        except OSError as error:
            raise unreadable(self.folder, str(error.strerror)) from error
        if damaged:
            raise CheckpointError(
                f"none of the checkpoints in {self.folder} can be loaded; to start again give the run another --name, "
                "or omit --resume; the existing folder will be renamed"
            )
        return None

    def _newest_first(self) -> Iterator[Path]:
        """Yield the files, `latest.pt` first. The others are only looked at if it is damaged or missing."""
        names = self._names()
        if self.latest.name in names:
            yield self.latest
        others = [path for path in self.older() if path.name in names]
        yield from sorted(others, key=step_of, reverse=True)


def best_in(path: Path) -> Path:
    """Return a run's best checkpoint, given its folder or checkpoint folder; the latest without one; a file as is."""
    for name in ("best.pt", "latest.pt"):
        for folder in (path / "checkpoints", path):
            if (folder / name).is_file():
                return folder / name
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
    path = None
    if rank.is_main:
        checkpoint = _find(resume, own_folder)
        if checkpoint is not None:
            path = checkpoint.path
    path = from_main(path, rank)  # every process
    if checkpoint is None and path is not None:
        checkpoint = LoadedCheckpoint(path, read_checkpoint(path))
    return checkpoint


def _find(resume: str, own_folder: Path) -> LoadedCheckpoint | None:
    if resume == "auto":
        return CheckpointFolder(own_folder).newest()
    path = without_tilde(resume, "resume")
    for folder in (path / "checkpoints", path):
        checkpoint = CheckpointFolder(folder).newest()
        if checkpoint is not None:
            return checkpoint
    return LoadedCheckpoint(path, read_checkpoint(path))
