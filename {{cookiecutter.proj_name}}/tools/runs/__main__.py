"""Compare runs in a table: python -m tools.runs [FOLDER ...]

A row has the state of a run, its best validation, the config keys that differ between the runs, and other results.
`val` are the results of the best validation, `eval` those of the last evaluation during training.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.base.errors import UserError
from common.base.text import number
from common.run.paths import PROJECT
from tools.runs import compare
from tools.runs.read import RunFiles

Row = dict[str, Any]  # the columns of a run by name; missing where it has none


def read(folders: Sequence[Path]) -> list[RunFiles]:
    """Read the runs in the folders, each named by its path there. Raises `UserError` if a folder has no run."""
    runs = {}
    for folder in folders:
        for run in compare.find_runs(folder):
            if len(folders) > 1:
                run.name = str(run.path)
            elif run.path != folder:
                run.name = str(run.path.relative_to(folder))
            runs[run.path.resolve()] = run
    return list(runs.values())


def row_of(run: RunFiles, keys: Sequence[str]) -> Row:
    """Return the columns of a run; of its config, the values of `keys`."""
    row: Row = {"run": run.name, "state": run.state}
    for key in keys:
        if key in run.config:
            row[key] = run.config[key]
    if run.best is not None:  # after a key `metric`, of a run without metrics
        row |= {"metric": run.best["metric"], "best": run.best["value"], "at": run.best["step"]}
    row |= compare.results(run)
    row["step"] = run.step
    row["epoch"] = max([0, *(record.get("epoch", 0) for record in run.records)])
    remarks = run.problems
    if run.reason not in ("", run.state):
        remarks = [run.reason, *remarks]
    if remarks:
        row["remark"] = " ".join("; ".join(remarks).split())
    return row


def columns(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Return the columns that the rows have, in order."""
    found = {name for row in rows for name in row}
    results = sorted(name for name in found if name.startswith(("val.", "eval.")))
    ordered = dict.fromkeys(["run", "state", "metric", "best", "at", *keys, *results, "step", "epoch", "remark"])
    return [name for name in ordered if name in found]


def table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return the rows as text."""
    lines = [""] * (len(rows) + 1)
    for name in names:
        cells = [name, *(_cell(row, name) for row in rows)]
        width = max(map(len, cells)) + 2
        lines = [line + cell.ljust(width) for line, cell in zip(lines, cells, strict=True)]
    return "\n".join(line.rstrip() for line in lines)


def _cell(row: Row, name: str) -> str:
    if name not in row:
        return "-"
    if name.startswith(("best", "val.", "eval.")) and isinstance(row[name], float):
        return number(row[name]).strip()
    return compare.to_text(row[name])


def main(argv: list[str]) -> int:
    """Read the command line and the runs, and print them. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.runs", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="default: experiments")
    parser.add_argument("--csv", action="store_true", help="in full precision, for programs")
    options = parser.parse_args(argv)
    runs = read(options.folders or [PROJECT / "experiments"])
    ranked = compare.rank_runs(runs)
    in_order = [run for group in ranked for run in group]
    in_order += [run for run in runs if run not in in_order]
    keys = compare.differing(in_order)
    rows = [row_of(run, keys) for run in in_order]
    names = columns(rows, keys)
    if options.csv:
        writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return 0
    print(table(rows, names))
    print("\n".join(compare.conclusion(ranked, keys)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:  # not through `report_errors`, which imports PyTorch: seconds for a table
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
