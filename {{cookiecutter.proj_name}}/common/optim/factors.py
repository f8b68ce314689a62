"""Learning rate factors as functions of the optimizer step, counted from 0. No history: any step can be asked for."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

Factor = Callable[[int], float]


def constant(step: int) -> float:
    """Always 1."""
    return 1.0


def ramp(warmup: int, start: float) -> Factor:
    """A straight line from `start`, one step before the first, to 1 at step `warmup`: above 0 at once, 1 ever after."""
    return lambda step: 1.0 if step >= warmup else start + (1.0 - start) * (step + 1) / (warmup + 1)


def after_ramp(main: Factor, warmup: int, start: float) -> Factor:
    """`main` from step `warmup` on, and before it a rise to where `main` begins there."""
    rise, begin = ramp(warmup, start), main(warmup)
    return lambda step: main(step) if step >= warmup else rise(step) * begin


def linear(begin: int, length: int, floor: float) -> Factor:
    """From 1 at `begin` to `floor` after `length` steps, and no further."""
    return lambda step: floor + (1.0 - floor) * (1.0 - min(1.0, (step - begin) / length))


def cosine(begin: int, length: int, floor: float) -> Factor:
    """From 1 at `begin` to `floor` after `length` steps along half a cosine, and no further."""
    return lambda step: floor + (1.0 - floor) * _wave(min(1.0, (step - begin) / length))


def poly(begin: int, length: int, floor: float, power: float) -> Factor:
    """From 1 at `begin` to `floor` after `length` steps, as the remaining part of them to a power."""
    return lambda step: floor + (1.0 - floor) * (1.0 - min(1.0, (step - begin) / length)) ** power


def multistep(milestones: Sequence[int], gamma: float, floor: float) -> Factor:
    """A drop by `gamma` at every milestone, counting that step itself."""
    ordered = sorted(milestones)
    return lambda step: max(floor, gamma ** bisect_right(ordered, step))


def exponential(begin: int, length: int, gamma: float, floor: float) -> Factor:
    """From 1 at `begin` to `gamma` after `length` steps, and on at the same pace."""
    return lambda step: max(floor, gamma ** ((step - begin) / length))


def onecycle(begin: int, length: int, start: float, end: float, rising: float) -> Factor:
    """From `start` up to 1 in the part `rising` of `length` steps, then down to `end` at the last, along cosines."""
    peak, last = rising * length - 1.0, length - 1.0

    def factor(step: int) -> float:
        at = step - begin
        if at < peak:
            return 1.0 + (start - 1.0) * _wave(at / peak)
        return end + (1.0 - end) * _wave(min(1.0, (at - peak) / (last - peak)))

    return factor


def _wave(x: float) -> float:
    """Half a cosine: from 1 at x = 0 to 0 at x = 1."""
    return (1.0 + math.cos(math.pi * x)) / 2.0
