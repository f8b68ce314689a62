"""The code of two runs and of the commits between them, copied out. The owner's files and index are only read."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.base.errors import UserError
from common.distributed.code import code_of
from common.run.paths import PROJECT
from tools.bisect.records import Recorded


@dataclass(frozen=True)
class Point:
    """The code at one point of the way: of a commit, and perhaps with the uncommitted changes in a run's git.diff.

    Attributes:
        commit: None without git: the code as it is now.
        step: how it differs from the point before.
    """

    commit: str | None
    step: str = ""
    diff: Path | None = None


def points_between(good: Recorded, bad: Recorded) -> list[Point]:
    """Return the code of GOOD, of each commit on the way, and of BAD. Commits that change only pages (*.md) are left out.

    If GOOD's commit is not in BAD's history, the way first takes back the commits that only GOOD has.

    Raises:
        UserError: a commit is not in this repository.
    """
    (first, last), (before, after) = zip(*((run.start["git"]["commit"], run.diff) for run in (good, bad)), strict=True)
    if first is None or last is None:
        return [Point(None)]
    base = git("merge-base", first, last).strip()
    back, forth = (git("rev-list", "--first-parent", f"{base}..{tip}", "--", ".", ":(exclude)*.md").split()
                   for tip in (first, last))  # fmt: skip
    points = [Point(first, "", before)]
    if before and (first, before.read_bytes()) != (last, after and after.read_bytes()):
        points.append(Point(first, "taking back GOOD's uncommitted changes"))
    points += [Point(f"{commit}^", f"taking back {_name(commit)}") for commit in back]
    points += [Point(commit, _name(commit)) for commit in reversed(forth)]
    return [*points, Point(last, "BAD's uncommitted changes", after)] if after and not points[-1].diff else points


class Copies:
    """Copies of the code in a temporary folder.

    Args:
        untracked: Python files that git does not know; they are taken as they are now.
    """

    def __init__(self, folder: Path, points: Sequence[Point], untracked: Collection[str]) -> None:
        self._folder, self._points = folder, points
        self._untracked = [name for name in untracked if (PROJECT / name).is_file()]

    def digest(self, point: int) -> str:
        """Return a checksum of the code."""
        commit, diff = self._points[point].commit, self._points[point].diff
        files = [file.read_bytes() for file in (diff, *(PROJECT / name for name in self._untracked)) if file]
        return hashlib.sha256(repr([commit or code_of(), files]).encode()).hexdigest()

    def project(self, point: int, without: Collection[int] = ()) -> Path:
        """Return a folder with the code of `point`, without some of the steps that lead there.

        Raises:
            UserError: git has no such code, or a step cannot be taken back.
        """
        at, target = self._points[point], self._folder / "-".join(map(str, (point, *sorted(without))))
        if at.commit is None or target.exists():
            return PROJECT if at.commit is None else target
        partial = self._folder / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        if without:
            shutil.copytree(self.project(point), partial, symlinks=True)
        else:
            partial.mkdir(parents=True)
            subprocess.run(["tar", "-x", "-C", partial], input=_git("archive", at.commit), check=True)
            depth = 1 + len(Path(git("rev-parse", "--show-prefix").strip()).parts)
            git("apply", f"-p{depth}", str(at.diff), cwd=partial) if at.diff else None
            for name in self._untracked:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).exists() or shutil.copy2(PROJECT / name, partial / name)
        for step in sorted(without, reverse=True):
            (self._folder / "step.diff").write_bytes(self._difference(step))
            git("apply", "-R", "-p2", "--allow-empty", "../step.diff", cwd=partial)
        return partial.rename(target)

    def changed(self, step: int) -> list[str]:
        """Return the names of the files that a step changes."""
        names = self._difference(step, "--name-only").decode(errors="replace").splitlines()
        return [name.partition("/")[2] for name in names]

    def _difference(self, step: int, *options: str) -> bytes:
        folders = [self.project(at).name for at in (step, step + 1)]
        return _git("diff", "--no-index", "--binary", *options, *folders, cwd=self._folder, codes=(0, 1))


def _name(commit: str) -> str:
    return "commit " + git("log", "-1", "--format=%h '%s'", commit).strip()


def git(*words: str, cwd: Path = PROJECT) -> str:
    """Return what git prints, see `_git`."""
    return _git(*words, cwd=cwd).decode(errors="replace")


def _git(*words: str, cwd: Path = PROJECT, codes: Collection[int] = (0,)) -> bytes:
    """Return what git prints; of another folder than the project's, it takes no repository around it for its own.

    Raises:
        UserError: it fails.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {} if cwd == PROJECT else {"GIT_CEILING_DIRECTORIES": str(cwd.parent.resolve())}
    command = ["git", "--no-optional-locks", *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, check=False)
    if done.returncode not in codes:
        raise UserError(f"git {' '.join(words)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
