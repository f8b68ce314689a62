"""The search for what makes two runs differ. It decides which short run comes next, and trains nothing itself.

The changes from GOOD to BAD form one list: steps of the code, then settings. GOOD with none of them is good, with all
of them it is BAD, and halving finds the change that turns good into bad.
"""

from collections.abc import Callable, Sequence
from statistics import mean, stdev

_FAR = 4.0  # standard deviations; with four seeds, noise alone gets that far once in thirty times


def first_bad(count: int, is_bad: Callable[[int], bool | None]) -> tuple[int, int]:
    """Return the last good and the first bad number of 0 to `count`; those between them do not run.

    0 is good and `count` is bad. It next tries the number farthest from all that are known: at first the middle.
    """
    good, bad, silent = 0, count, set[int]()
    while unknown := [number for number in range(good + 1, bad) if number not in silent]:
        middle = max(unknown, key=lambda number: min(abs(number - known) for known in (good, bad, *silent)))
        result = is_bad(middle)
        if result is None:
            silent.add(middle)
        elif result:
            bad = middle
        else:
            good = middle
    return good, bad


class Noise:
    """The values of GOOD over seeds, two at least: their mean and standard deviation."""

    def __init__(self, values: Sequence[float]) -> None:
        self.mean, self.deviation = mean(values), stdev(values)

    def hides(self, bad: float) -> bool:
        """Return whether noise could be why BAD's value differs; NaN never lies within it."""
        return abs(bad - self.mean) <= _FAR * self.deviation

    def is_bad(self, value: float, bad: float) -> bool:
        """Return whether `value` is nearer to BAD's than to the mean, or beyond. NaN is; if BAD's is NaN, only that."""
        if bad != bad or value != value:
            return value != value
        return (value - self.mean) / (bad - self.mean) > 0.5
