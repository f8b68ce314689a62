"""The version of the code, according to git."""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SNAPSHOT = ".snapshot.json"  # in a copy of the code: the git state of the original
_TIMEOUT_S = 5.0  # for each call: a hanging network disk must not hold up a run


@dataclass
class GitState:
    """The code's version; `note` is git's error, if any.

    Attributes:
        diff: for `git apply`; bytes that are not UTF-8 are kept as surrogates.
    """

    commit: str | None = None
    branch: str | None = None
    dirty: bool = False
    untracked: list[str] = field(default_factory=list)
    note: str = ""
    diff: str = field(default="", repr=False)

    def __str__(self) -> str:
        if self.commit is None:
            if "not a git" in self.note:
                return "no git repository (git init creates one)"
            return f"unknown ({self.note})"
        text = f"{self.commit[:12]} on {self.branch}"
        if self.dirty:
            text += " + uncommitted changes"
        return text

    def patch(self) -> str:
        """Text of `git.diff`: comment lines, then a patch for `git apply`, from the commit to the code that ran."""
        text = f"# git: {self}\n"
        for name in self.untracked:
            text += f"# not tracked, so not in here: {name}\n"
        if self.note:
            text += f"# {self.note}\n"
        return text + self.diff


def git_state(project: Path) -> GitState:
    """Return the git state of the folder `project`. Never fails."""
    if is_copy(project):  # not a repository, though it may lie inside one
        return GitState(**json.loads((project / SNAPSHOT).read_text()))
    state = GitState()
    try:
        head = _git(project, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
        state.commit, state.branch = head.split()
        state.dirty = True  # until the diff says otherwise
        # No external diff programs or text filters: the user configures them, and they may run anything.
        state.diff = _git(
            project, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--", "."
        )
        state.untracked = git_files(project, "--others", "--directory")
        state.dirty = bool(state.diff)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        state.note = " ".join(said.split()) or str(error)
    return state


def is_copy(project: Path) -> bool:
    """Return whether this code was copied for a job, and so is exactly what ran."""
    return (project / SNAPSHOT).is_file()


def git_files(project: Path, *options: str) -> list[str]:
    """Files that `git ls-files` lists below `project`, relative to it, without ignored ones.

    Raises:
        OSError, SubprocessError: there is no git, or no repository.
    """
    listed = _git(project, "ls-files", "--exclude-standard", "-z", *options)
    return [name for name in listed.split("\0") if name]


def _git(project: Path, *arguments: str) -> str:
    # Inside git hooks, GIT_DIR and others are set, and would point to another repository.
    environment = dict(os.environ)
    for name in os.environ:
        if name.startswith("GIT_"):
            del environment[name]
    command = ["git", "--no-optional-locks", *arguments]
    done = subprocess.run(
        command,
        cwd=project,
        env=environment,
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return done.stdout.decode(errors="surrogateescape")
