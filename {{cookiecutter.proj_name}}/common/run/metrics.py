"""Reads metrics.jsonl, the measurements of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_metrics(
    file: Path,
    on_error: Callable[[Exception], None] = lambda error: None,
) -> list[dict[str, Any]]:
    """Read the lines of a metrics file in their order, each with `event`, `step` and `values`.

    Values are floats, NaN and infinite ones too. A damaged line is skipped and its error given to `on_error`; a last
    line that a kill has cut off is no damage. Raises `OSError`.
    """
    rows = []
    for line in file.read_text(errors="replace").split("\n")[:-1]:
        try:
            row = json.loads(line)
            measured = row.get("values", {})
            values = {name: float(value) for name, value in measured.items()}
        except (ValueError, TypeError, AttributeError) as error:
            on_error(error)
        else:
            rows.append({"event": "", "step": 0, **row, "values": values})
    return rows
