"""Tables for a spreadsheet."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.base.files import write_text
from common.config.registry import WRITER_REGISTRY
from common.monitor.writer import Writer, WriterRun


@WRITER_REGISTRY.register("csv")
class CsvWriter(Writer):
    """One table per group of numbers, `<folder>/train.csv`, `val.csv`, ...: the step, then a column for each name.

    Numbers only, all their digits; pictures and texts are left out.

    Args:
        run: supplied by the program.
        folder: in the run folder.
    """

    def __init__(self, run: WriterRun, folder: str = "csv") -> None:
        self.folder = run.folder / folder
        self.folder.mkdir(exist_ok=True)
        self.columns: dict[str, list[str]] = {}
        for path in self.folder.glob("*.csv"):
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                rows, columns = list(reader), list(reader.fieldnames or ["step"])
            if run.resume_step is not None:  # a kill may have cut off the last line
                kept = [row for row in rows if (row["step"] or "").isdecimal() and int(row["step"]) <= run.resume_step]
                self._replace(path, columns, kept)
            self.columns[path.stem] = columns

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        path, row = self.folder / f"{event}.csv", {"step": step, **values}
        columns = self.columns.setdefault(event, [])
        if new := [name for name in row if name not in columns]:
            columns += new
            rows: list[dict[str, Any]] = []
            if path.exists():
                with path.open(newline="") as file:
                    rows = list(csv.DictReader(file))
            self._replace(path, columns, rows)
        with path.open("a", newline="") as file:
            csv.DictWriter(file, columns).writerow(row)

    def images(self, step: int, tag: str, images: Sequence[NDArray[np.uint8]]) -> None:
        """Nothing: a table has no pictures."""

    def text(self, step: int, tag: str, text: str) -> None:
        """Nothing."""

    def close(self, state: str) -> None:
        """Nothing: each row was written at once."""

    def _replace(self, path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table anew, in one move."""
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, columns)
        writer.writeheader()
        writer.writerows(rows)
        write_text(path, table.getvalue())
