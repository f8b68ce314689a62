"""What A and B name: the folder of a run, a config, or a commit, whose code is copied to a temporary folder."""

import os
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
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
        with suppress(UserError):
            return cls("commit", text, commit=git("rev-parse", "--verify", f"{text}^{{commit}}"))
        raise UserError(f"{text} is neither the folder of a run, nor a config file, nor a commit of {PROJECT}")

    def __str__(self) -> str:
        return f"{self.text} ({git('show', '-s', '--format=%h %s', self.commit)})" if self.commit else self.text

    def export(self, folder: Path, diff: bytes = b"", untracked: Iterable[str] = ()) -> Path:
        """Return the project of this side: the working tree itself, or a copy of a commit in `folder`.

        What git ignores is linked, since data and earlier runs are there, except what is built from the code.

        Args:
            diff: uncommitted changes to the commit, as in `git.diff` of a run.
            untracked: files and folders that git did not know; they are linked, as they are now.

        Raises:
            UserError: the commit does not have the project, or does not fit the changes.
        """
        if not self.commit:
            return PROJECT
        archive = folder.with_suffix(".tar")
        try:
            git("archive", "--output", str(archive), self.commit)  # of the project's folder, from within it
        except UserError as error:
            raise UserError(f"commit {self} does not have the folder {PROJECT}: {error}") from error
        folder.mkdir()
        subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
        if diff:
            outer_folders = len(Path(git("rev-parse", "--show-prefix")).parts)
            git("apply", f"-p{1 + outer_folders}", "-", cwd=folder, given=diff)
        ignored = git("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z")
        for name in (*filter(None, ignored.split("\0")), *untracked):
            link = folder / name.rstrip("/")
            if (PROJECT / name).exists() and not (link.exists() or set(_BUILT) & set(Path(name).parts)):
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(PROJECT / name)
        return folder


def git(*words: str, cwd: Path | None = None, given: bytes = b"") -> str:
    """Return what git prints, by default in the project's folder. Raises `UserError` if it fails, or is missing."""
    # Inside git hooks, GIT_DIR and others are set, and would point to another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_CEILING_DIRECTORIES"] = os.path.realpath(tempfile.gettempdir())  # copies of the code are in none
    words = ("git", *words)
    try:
        done = subprocess.run(words, cwd=cwd or PROJECT, env=env, input=given, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace").strip()
        raise UserError(f"git {words[1]}: {said}") from error
    return done.stdout.decode(errors="surrogateescape").rstrip("\n")
