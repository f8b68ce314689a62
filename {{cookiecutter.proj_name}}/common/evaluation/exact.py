"""Sums of floats that do not depend on the order of the terms, nor on the number of processes."""

import math

_BITS = 1074  # every finite float is a whole number of 2**-1074, the smallest one


class ExactSum:
    """A sum of floats that is kept exactly, and rounded once, when it is read.

    It is held as one whole number of the smallest float (Kulisch's long accumulator; Kulisch and Miranker 1981), so
    adding and merging are exact and their order has no effect. It takes up to 300 bytes, and an addition 0.5 us.
    """

    def __init__(self) -> None:
        self._units = 0
        self._not_finite = 0.0  # the sum of infinities and NaNs

    def add(self, value: float) -> None:
        """Add a float; a tensor of one element is read, which waits for its device."""
        value = float(value)
        if not math.isfinite(value):
            self._not_finite += value
            return
        numerator, denominator = value.as_integer_ratio()  # the denominator is a power of two
        self._units += numerator << (_BITS + 1 - denominator.bit_length())

    def merge(self, other: "ExactSum") -> None:
        """Add another sum."""
        self._units += other._units
        self._not_finite += other._not_finite

    @property
    def value(self) -> float:
        """The float nearest to the sum."""
        if self._not_finite:
            return self._not_finite
        try:
            return self._units / (1 << _BITS)  # Python rounds the quotient of whole numbers correctly
        except OverflowError:
            return math.inf if self._units > 0 else -math.inf
