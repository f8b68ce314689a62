"""How values are written, for people and for programs."""

import json
import math
from collections.abc import Mapping
from typing import Any


def number(value: float) -> str:
    """Return a measured value for log, tables, reports: at least seven characters, and two significant digits.

    0.00042 becomes 4.2e-04: it must not be shown as 0.000.
    """
    size = abs(value)
    form = "#.6g"
    if 0 < size < 1e-3 or 1e5 <= size < math.inf:
        form = ".1e"
    elif size < 1:
        form = ".5f"
    return f"{value:{form}}".rjust(7)


def label(split: str, name: str) -> str:
    """Return the name of a set in messages: its split, or split.name."""
    return f"{split}.{name}" if name else split


def plain(value: Any) -> Any:
    """`value` in types of JSON. Floats keep every digit: Python writes the shortest text that reads back the same.

    JSON has no NaN and Infinity, so they become strings, which Python's float() and JavaScript's Number() read.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    number = float(value)
    if math.isfinite(number):
        return number
    return json.dumps(number)


def flat(
    config: Mapping[str, Any],
    prefix: str = "",
) -> dict[str, Any]:
    """Return a nested config as one dict with dotted keys: `{"optim.lr": 0.001}`. Lists stay as they are."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
