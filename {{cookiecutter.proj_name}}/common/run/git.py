"""The version of the code, as git knows it."""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SNAPSHOT = ".snapshot.json"  # in a copy of the code: the git state of what it was copied from
_TIMEOUT_S = 5.0  # for each call: a hanging network disk must not hold up a run


@dataclass
class GitState:
    """The code's version; `note` says what git could not tell, and why.

    Attributes:
        diff: for `git apply`; bytes that are not UTF-8 are there as surrogates.
    """

    commit: str | None = None
    branch: str | None = None
    dirty: bool = False
    untracked: list[str] = field(default_factory=list)
    note: str = ""
    diff: str = field(default="", repr=False)

    def __str__(self) -> str:
        if self.commit is None:
            return f"unknown ({self.note})"
        changes = " + uncommitted changes" if self.dirty else ""
        return f"{self.commit[:12]} on {self.branch}{changes}"

    def patch(self) -> str:
        """`git.diff`: lines of comment, then what `git apply` needs to get from the commit to the code that ran."""
        head = [f"git: {self}", *(f"not tracked, so not in here: {name}" for name in self.untracked), self.note]
        return "".join(f"# {line}\n" for line in head if line) + self.diff


def git_state(project: Path) -> GitState:
    """Ask git about the folder `project`. Never fails."""
    if is_copy(project):  # no repository, though it may lie inside one
        return GitState(**json.loads((project / SNAPSHOT).read_text()))
    state = GitState()
    try:
        state.commit, state.branch = _git(project, "rev-parse", "HEAD", "--abbrev-ref", "HEAD").split()
        state.dirty = True  # until the diff says otherwise
        # No external diff programs or text filters: they are the user's, and may run anything.
        state.diff = _git(
            project, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--", "."
        )
        state.untracked = git_files(project, "--others", "--directory")
        state.dirty = bool(state.diff)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")
        state.note = said.partition("\n")[0] or str(error)
    return state


def is_copy(project: Path) -> bool:
    """Whether this code was copied for a job, see `common.slurm.submission`, and so is just what ran."""
    return (project / SNAPSHOT).is_file()


def git_files(project: Path, *options: str) -> list[str]:
    """What `git ls-files` lists below `project`, relative to it, without what git ignores.

    Raises:
        OSError, SubprocessError: there is no git, or no repository.
    """
    listed = _git(project, "ls-files", "--exclude-standard", "-z", *options)
    return [name for name in listed.split("\0") if name]


def _git(project: Path, *arguments: str) -> str:
    # Inside git's hooks GIT_DIR and others are set, which would point at another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", *arguments]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=True)
    return done.stdout.decode(errors="surrogateescape")
