"""How values are written for people."""


def number(value: float) -> str:
    """A measured value in seven characters with at least two significant digits; the same in log, tables and reports.

    0.00042 becomes 4.2e-04: it must not be shown as 0.000.
    """
    form = ".1e" if 0 < abs(value) < 1e-3 or 1e5 <= abs(value) < float("inf") else ".5f" if abs(value) < 1 else "#.6g"
    return f"{value:{form}}".rjust(7)


def label(split: str, name: str) -> str:
    """The name of a set in messages: its split, or split.name."""
    return f"{split}.{name}" if name else split
