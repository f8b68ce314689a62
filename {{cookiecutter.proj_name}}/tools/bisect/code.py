"""The code of two runs and of the commits between them."""

from dataclasses import dataclass

from tools.same.sides import git


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
    """Return the code of GOOD, of each commit on the way, and of BAD; commits that change only pages are omitted.

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
