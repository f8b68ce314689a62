"""Tables for a spreadsheet."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.base.files import write_text
from common.config.registry import WRITER_REGISTRY
from common.monitor.writer import Writer, WriterRun


@WRITER_REGISTRY.register("csv")
class CsvWriter(Writer):
    """One table per group of numbers, `<folder>/train.csv`, `val.csv`, ...: the step, then a column per name.

    Numbers have all their digits; pictures and texts are left out. The tables are written at each checkpoint and at
    the end.

    Args:
        run: supplied by the program.
        folder: folder of the tables, in the run folder.
    """

    def __init__(self, run: WriterRun, folder: str = "csv") -> None:
        self.folder, self.tables = run.folder / folder, dict[str, list[Mapping[str, Any]]]()
        for path in self.folder.glob("*.csv"):
            last, rows = run.resume_step, csv.DictReader(io.StringIO(path.read_text(), newline=""))
            self.tables[path.stem] = [row for row in rows if last is None or int(row["step"]) <= last]

    def scalars(self, event: str, step: int, values: Mapping[str, float]) -> None:
        self.tables.setdefault(event, []).append({"step": step, **values})

    def images(self, step: int, tag: str, images: Sequence[NDArray[np.uint8]]) -> None:
        """Do nothing: a table has no pictures."""

    def text(self, step: int, tag: str, text: str) -> None:
        """Do nothing: a table has no texts."""

    def flush(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for event, rows in self.tables.items():
            table = io.StringIO(newline="")
            writer = csv.DictWriter(table, dict.fromkeys(name for row in rows for name in row))
            writer.writeheader()
            writer.writerows(rows)
            write_text(self.folder / f"{event}.csv", table.getvalue())

    def close(self, state: str) -> None:
        self.flush()
