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
from tools.same.sides import Side


@dataclass(frozen=True)
class Point:
    """The code at one point of the way: of a commit, perhaps with the uncommitted changes that a run recorded.

    Attributes:
        commit: None without git: the code as it is now.
        step: how it differs from the point before.
        diff: the file `git.diff` of the run.
    """

    commit: str | None
    step: str = ""
    diff: Path | None = None


def way(good: Point, bad: Point) -> list[Point]:
    """Return the code of GOOD, of each commit on the way, and of BAD; commits that change only pages are left out.

    If GOOD's commit is not in BAD's history, the way first takes back the commits that only GOOD has.

    Raises:
        UserError: a commit is not in this repository.
    """
    if good.commit is None or bad.commit is None:
        return [Point(None)]
    base, points = git("merge-base", good.commit, bad.commit), [good]
    if good.diff and (not bad.diff or (good.commit, good.diff.read_text()) != (bad.commit, bad.diff.read_text())):
        points.append(Point(good.commit, "taking back GOOD's uncommitted changes"))
    words = ("--first-parent", "--format=%H commit %h '%s'", "--", ".", ":(exclude)*.md")
    back, forth = (git("log", f"{base}..{end.commit}", *words).splitlines() for end in (good, bad))
    points += [Point(f"{line[:40]}^", f"taking back {line[41:]}") for line in back]
    points += [Point(line[:40], line[41:]) for line in reversed(forth)]
    return [*points, bad] if bad.diff and not points[-1].diff else points


class Copies:
    """Copies of the code in a temporary folder.

    Args:
        untracked: names of Python files that git did not know; they are taken as they are now.
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
            for step in sorted(without, reverse=True):
                git("apply", "-R", "-p2", "--allow-empty", str(self._difference(step)), cwd=partial)
            return partial.rename(target)
        self._folder.mkdir(exist_ok=True)
        Side("commit", at.commit, commit=at.commit).export(partial)
        if at.diff:
            git("apply", f"-p{1 + len(Path(git('rev-parse', '--show-prefix')).parts)}", str(at.diff), cwd=partial)
        for name in self._untracked:
            if not (copy := partial / name).exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(PROJECT / name, copy)
        return partial.rename(target)

    def changed(self, step: int) -> list[str]:
        """Return the names of the files that a step changes."""
        return [line.partition("/")[2] for line in self._difference(step, "--name-only").read_text().splitlines()]

    def _difference(self, step: int, *options: str) -> Path:
        folders, file = [self.project(at).name for at in (step, step + 1)], self._folder / "difference"
        git("diff", "--no-index", "--binary", f"--output={file}", *options, *folders, cwd=self._folder, codes=(0, 1))
        return file


def git(*words: str, cwd: Path = PROJECT, codes: Collection[int] = (0,)) -> str:
    """Return what git prints. For another folder than the project's, a repository around it is not taken for its own.

    Raises:
        UserError: it fails.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {} if cwd == PROJECT else {"GIT_CEILING_DIRECTORIES": str(cwd.parent.resolve())}
    done = subprocess.run(["git", "--no-optional-locks", *words], cwd=cwd, env=environment, capture_output=True)
    if done.returncode not in codes:
        raise UserError(f"git {words[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace").strip()
