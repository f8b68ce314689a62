"""Comparison of plain values that no difference escapes."""

from typing import Any


def same(first: Any, second: Any) -> bool:
    """Return whether two values are equal, with their types, the order of keys, NaN and -0.0."""
    if isinstance(first, dict) and isinstance(second, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and repr(first) == repr(second)
