"""What A and B name: the folder of a run, a config, or a commit, whose code is copied to a temporary folder."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from common.base.errors import UserError
from common.run.paths import PROJECT

_BUILT = ("__pycache__", "build")  # ignored by git, but made from the code


@dataclass(frozen=True)
class Side:
    """A or B of the command line.

    Attributes:
        kind: run, config or commit.
        text: as given.
        path: of a run or a config.
        commit: its full name; empty: the working tree.
    """

    kind: str
    text: str
    path: Path = Path()
    commit: str = ""

    @classmethod
    def parse(cls, text: str) -> "Side":
        """Find out what `text` names. Raises `UserError` if it is nothing."""
        path = Path(text)
        if text == ".":
            return cls("commit", text)
        if path.exists():
            return cls("run" if path.is_dir() else "config", text, path.resolve())
        if commit := _git("rev-parse", "--verify", "--quiet", f"{text}^{{commit}}"):
            return cls("commit", text, commit=commit.strip())
        raise UserError(f"{text} is neither the folder of a run, nor a config file, nor a commit of {PROJECT}")

    def __str__(self) -> str:
        about = _git("show", "-s", "--format=%h %s", self.commit) if self.commit else ""
        return f"{self.text} ({about.strip()})" if about else self.text

    def export(self, folder: Path) -> Path:
        """Return the project of this side: the working tree itself, or a copy of a commit in `folder`.

        What git ignores is linked, since data and earlier runs are there, except what is built from the code.

        Raises:
            UserError: the commit does not have the project.
        """
        if not self.commit:
            return PROJECT
        archive = folder.with_suffix(".tar")
        if _git("archive", "--output", str(archive), self.commit) is None:  # of the project's folder, from within it
            raise UserError(f"commit {self} does not have the folder {PROJECT}")
        folder.mkdir()
        subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
        ignored = _git("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z") or ""
        for name in filter(None, ignored.split("\0")):
            link = folder / name.rstrip("/")
            if not (link.exists() or set(_BUILT) & set(link.parts)):
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(PROJECT / name)
        return folder


def _git(*arguments: str) -> str | None:
    """Return what git prints in the project's folder; None if it fails, or there is no git."""
    # Inside git hooks, GIT_DIR and others are set, and would point to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", *arguments], cwd=PROJECT, env=environment, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.decode(errors="surrogateescape")
