"""The search for what makes two runs differ. It decides which short run comes next, and trains nothing itself.

Settings in a fixed order, and steps of the code, are searched in the same way: the first so many of them are good, all
of them are bad, and halving finds the one in between that turns good to bad. If that one is not bad by itself, what it
needs lies before it, and is found in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2
from statistics import mean, stdev

_FAR = 4.0  # standard deviations; with four seeds, noise alone gets that far once in thirty times


@dataclass(frozen=True)
class Trial:
    """One short run: GOOD's, but for some changes.

    Attributes:
        settings: those that have BAD's values.
        point: the code after so many steps on the way from GOOD's to BAD's.
        without: numbers of steps, from 0, that are taken back in it.
        seed: None: GOOD's.
    """

    settings: frozenset[str] = frozenset()
    point: int = 0
    without: frozenset[int] = frozenset()
    seed: int | None = None


@dataclass(frozen=True)
class Cause:
    """Settings, a step of the code, or both, that turn good to bad; each of them is needed.

    Attributes:
        present: GOOD with nothing but these changes and the code before the step; `settings` are those of the cause.
        steps: the number of the step; several if no run can tell them apart.
        absent: BAD without these changes.
    """

    present: Trial
    steps: range
    absent: Trial


Judge = Callable[[Trial], bool | None]
"""Says whether a trial is bad; None if it does not run. It is asked about some trials more than once."""


def find_causes(settings: Sequence[str], steps: int, is_bad: Judge) -> Iterator[Cause]:
    """Yield what makes the difference, until BAD without it is no longer bad.

    Args:
        settings: those that differ. GOOD is good; with all of them, and all `steps` of the code, it is BAD.
    """
    left, without = list(settings), frozenset[int]()
    while left or len(without) < steps:
        present, changed = _one_cause(left, steps, without, is_bad)
        left, without = [each for each in left if each not in present.settings], without | {*changed}
        yield Cause(present, changed, absent := Trial(frozenset(left), steps, without))
        if not is_bad(absent):
            return


def _one_cause(settings: Sequence[str], steps: int, without: frozenset[int], is_bad: Judge) -> tuple[Trial, range]:
    def trial(chosen: Sequence[str], point: int) -> Trial:
        return Trial(frozenset(chosen), point, frozenset(step for step in without if step < point))

    def found_with(count: int) -> list[str]:
        return [*rest[:count], *found]

    found, rest = list[str](), list(settings)
    while rest and not is_bad(trial(found, steps)):  # at first: GOOD's settings with BAD's code
        start, end = first_bad(len(rest), lambda count: is_bad(trial(found_with(count), steps)))
        found, rest = [*rest[start:end], *found], rest[:start]
        if is_bad(alone := trial(found, 0)):
            return alone, range(0)
    start, end = first_bad(steps, lambda point: is_bad(trial(found, point)))
    return trial(found, end), range(start, end)


def first_bad(count: int, is_bad: Callable[[int], bool | None]) -> tuple[int, int]:
    """Return the last good and the first bad number of 0 to `count`; those between them do not run.

    0 is good and `count` is bad. Tried next is the number farthest from all that are known: at first the middle.
    """
    good, bad, silent = 0, count, set[int]()
    while unknown := [number for number in range(good + 1, bad) if number not in silent]:
        middle = max(unknown, key=lambda number: min(abs(number - known) for known in (good, bad, *silent)))
        if (result := is_bad(middle)) is None:
            silent.add(middle)
        good, bad = (middle if result is False else good), (middle if result else bad)
    return good, bad


def most_runs(settings: int, steps: int) -> int:
    """Return how many runs the search takes at most, if a single change makes the difference and all code runs."""
    of_settings = ceil(log2(settings)) + (settings > 1 or steps > 0) if settings else 0
    return bool(settings and steps) + max(of_settings, ceil(log2(steps)) if steps else 0) + 1


class Noise:
    """The values of GOOD over seeds: their mean and standard deviation. They must be finite, and two at least."""

    def __init__(self, values: Sequence[float]) -> None:
        self.mean, self.deviation = mean(values), stdev(values)

    def hides(self, bad: float) -> bool:
        """Return whether noise could be why BAD's value differs; NaN never lies within it."""
        return abs(bad - self.mean) <= _FAR * self.deviation

    def is_bad(self, value: float, bad: float) -> bool:
        """Return whether `value` is nearer to BAD's than to the mean, or beyond BAD's; NaN only is if BAD's is."""
        if bad != bad or value != value:
            return value != value
        return (value - self.mean) / (bad - self.mean) > 0.5
