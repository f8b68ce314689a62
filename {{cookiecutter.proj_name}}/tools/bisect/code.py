"""The code of two runs and of the commits between them, copied out. The owner's files and index are only read."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.run.paths import PROJECT
from tools.same.sides import Side, git


@dataclass(frozen=True)
class Point:
    """The code at one point of the way: of a commit, perhaps with the uncommitted changes that a run recorded.

    Attributes:
        commit: empty without git: the code as it is now.
        step: how it differs from the point before.
        diff: what is in `git.diff` of the run.
    """

    commit: str
    step: str = ""
    diff: bytes = b""


def way(good: Point, bad: Point) -> list[Point]:
    """Return the code of GOOD, of each commit on the way, and of BAD; commits that change only pages are left out.

    If GOOD's commit is not in BAD's history, the way first takes back the commits that only GOOD has.

    Raises:
        UserError: a commit is not in this repository.
    """
    if not good.commit or not bad.commit:
        return [Point("")]
    if (good.commit, good.diff) == (bad.commit, bad.diff):
        return [good]
    base = git("merge-base", good.commit, bad.commit)
    words = ("--first-parent", "--format=%H commit %h '%s'", "--", ".", ":(exclude)*.md")
    back, forth = (git("log", f"{base}..{end.commit}", *words).splitlines() for end in (good, bad))
    points = [good, Point(good.commit, "taking back GOOD's uncommitted changes")] if good.diff else [good]
    points += [Point(f"{line[:40]}^", f"taking back {line[41:]}") for line in back]
    points += [Point(line[:40], line[41:]) for line in reversed(forth)]
    return [*points, bad] if bad.diff else points


def export(point: Point, untracked: Iterable[str], folder: Path) -> Path:
    """Return the project with the code of `point`: a copy in `folder`, or the project itself without git.

    Args:
        untracked: files and folders that git did not know; they are linked, as they are now.

    Raises:
        UserError: git has no such code.
    """
    project = Side("commit", point.commit, commit=point.commit).export(folder)
    if project == PROJECT:
        return PROJECT
    if point.diff:
        outer_folders = len(Path(git("rev-parse", "--show-prefix")).parts)
        git("apply", f"-p{1 + outer_folders}", "-", cwd=project, given=point.diff)
    for name in untracked:
        source, link = PROJECT / name, project / name
        if source.exists() and not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)
    return project
