"""The files below a folder."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from loguru import logger


@dataclass
class FilesBelow:
    """The files below a folder, in the order of their names, those of linked folders too, hidden ones left out.

    Attributes:
        left_out: what cannot be read, by kind: broken links, folders without permission, links to folders above.
    """

    root: Path
    files: list[Path] = field(default_factory=list)
    left_out: dict[str, list[Path]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._read(self.root, set())

    def __str__(self) -> str:
        """What is left out, and the first of it; "" if nothing is."""
        if not self.left_out:
            return ""
        counts = ", ".join(f"{len(paths)} {kind}{'s' * (len(paths) > 1)}" for kind, paths in self.left_out.items())
        first = next(iter(self.left_out.values()))[0]
        return f"{self.root}: left out: {counts}; the first: {first}"

    def warn(self) -> None:
        """Log what is left out, if anything is."""
        if self.left_out:
            logger.warning("{}", self)

    def _read(self, folder: Path, above: set[str]) -> None:
        """`above`: the folders that contain this one, without links."""
        here = os.path.realpath(folder)
        if here in above:
            self._leave_out("link to a folder above it", folder)
            return
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            self._leave_out("unreadable folder", folder)
            return
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not os.path.exists(entry.path):
                self._leave_out("broken link", Path(entry.path))
            elif entry.is_dir():
                self._read(Path(entry.path), {*above, here})
            elif entry.is_file():
                self.files.append(Path(entry.path))

    def _leave_out(self, kind: str, path: Path) -> None:
        self.left_out.setdefault(kind, []).append(path)
