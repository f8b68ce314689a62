"""The version of the code, as git knows it."""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SNAPSHOT = ".snapshot.json"  # in a copy of the code: the git state of what it was copied from
_TIMEOUT_S = 5.0  # for each call: a hanging network disk must not hold up a run
_MAX_DIFF_BYTES = 10 * 2**20  # more is data, not code


@dataclass(frozen=True)
class GitState:
    """The code's version. `commit` is None and `note` says why when there is none."""

    commit: str | None = None
    branch: str | None = None
    dirty: bool = False
    untracked: list[str] = field(default_factory=list)
    diff: bytes = b""
    note: str = ""

    def __str__(self) -> str:
        if self.commit is None:
            return f"unknown ({self.note})"
        changes = " + uncommitted changes" if self.dirty else ""
        return f"{self.commit[:12]} on {self.branch}{changes}"

    def patch(self) -> bytes:
        """`git.diff`: lines of comment, then what `git apply` needs to get from the commit to the code that ran."""
        head = [f"# git: {self}", *(f"# not tracked, so not in here: {name}" for name in self.untracked)]
        if self.note and self.commit is not None:
            head.append(f"# {self.note}")
        # Names come from the file system and need not be UTF-8.
        return "\n".join(head).encode(errors="surrogateescape") + b"\n" + self.diff

    def to_json(self) -> str:
        """For `from_json`, in a copy of the code."""
        return json.dumps({**vars(self), "diff": self.diff.decode(errors="surrogateescape")}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "GitState":
        """What `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "diff": values["diff"].encode(errors="surrogateescape")})


class _GitError(Exception):
    pass


def git_state(project: Path) -> GitState:
    """Ask git about the folder `project`. Never fails."""
    if is_copy(project):  # no repository, though it may lie inside one
        return GitState.from_json((project / SNAPSHOT).read_text())
    try:
        commit, branch = os.fsdecode(_git(project, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")).split()
    except _GitError as error:
        return GitState(note="no commit yet" if "'HEAD'" in str(error) else str(error))
    try:
        # No external diff programs or text filters: they are the user's, and may run anything.
        diff = _git(project, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--", ".")
        untracked = _files(project, "--others", "--directory")
    except _GitError as error:
        return GitState(commit, branch, dirty=True, note=f"no diff: {error}")
    if len(diff) > _MAX_DIFF_BYTES:
        return GitState(commit, branch, True, untracked, note=f"no diff: it has {len(diff) / 2**20:.0f} MB")
    return GitState(commit, branch, bool(diff), untracked, diff)


def is_copy(project: Path) -> bool:
    """Whether this code was copied for a job, see `common.slurm.submission`, and so is just what ran."""
    return (project / SNAPSHOT).is_file()


def git_files(project: Path) -> list[str]:
    """The files below `project` that git knows or does not ignore, relative to it; none where there is no git."""
    try:
        return _files(project, "--cached", "--others", "--deduplicate")
    except _GitError:
        return []


def _files(project: Path, *options: str) -> list[str]:
    listed = _git(project, "ls-files", "--exclude-standard", "-z", *options)
    return [os.fsdecode(name) for name in listed.split(b"\0") if name]


def _git(project: Path, *arguments: str) -> bytes:
    # Inside git's hooks GIT_DIR and others are set, which would point at another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"LC_ALL": "C"}
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _GitError(f"git took longer than {_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise _GitError(f"git cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or [f"git ended with {done.returncode}"]
        raise _GitError(reason[0].removeprefix("fatal: "))
    return done.stdout
