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
            if run.path != folder:
                run.name = str(run.path.relative_to(folder) if len(folders) == 1 else run.path)
            runs[run.path.resolve()] = run
    return list(runs.values())


def row_of(run: RunFiles, keys: Sequence[str]) -> Row:
    """Return the columns of a run; of its config, the values of `keys`."""
    row: Row = {"run": run.name, "state": run.state}
    row |= {key: run.config[key] for key in keys if key in run.config}
    if run.best:  # after a key `metric`, of a run without metrics
        row |= {"metric": run.best["metric"], "best": run.best["value"], "at": run.best["step"]}
    row |= compare.results(run)
    row |= {"step": run.step, "epoch": max((each.get("epoch", 0) for each in run.records), default=0)}
    remarks = [" ".join(text.split()) for text in (run.reason, *run.problems) if text not in ("", run.state)]
    if remarks:
        row["remark"] = "; ".join(remarks)
    return row


def columns(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Return the columns that the rows have. A value equal to the loss in each row, its only part, is left out."""
    found = dict.fromkeys(name for row in rows for name in row)
    results = [name for name in found if name.startswith(("val.", "eval."))]
    results.sort(key=lambda name: (name.lower().endswith("loss"), name.startswith("eval.")))
    for name in list(results):
        total = f"{name.partition('.')[0]}.loss"
        if name != total and all(row.get(name) == row.get(total) for row in rows):
            results.remove(name)
    ordered = ["run", "state", "metric", "best", "at", *keys, *results, "step", "epoch", "remark"]
    return [name for name in dict.fromkeys(ordered) if name in found]


def table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return the rows as text."""
    short = compare.short_names(names)
    texts = []
    for name in names:
        title = name if name.startswith(("val.", "eval.")) or name.endswith(".type") else short[name]
        cells = [title, *(_cell(row, name) for row in rows)]
        side = ">" if all(isinstance(row.get(name, 0), (int, float)) for row in rows) else "<"
        longest = max(map(len, cells))
        texts.append([f"{cell:{side}{longest}}" for cell in cells])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*texts, strict=True))


def _cell(row: Row, name: str) -> str:
    if name not in row:
        return "-"
    if name == "best" or name.startswith(("val.", "eval.")):
        return number(row[name]).strip()
    return compare.to_text(row[name])


def write_csv(rows: Sequence[Row], names: Sequence[str]) -> None:
    """Write all columns in full precision to the standard output."""
    writer = csv.DictWriter(sys.stdout, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def main(argv: list[str]) -> int:
    """Read the command line and the runs, and print them. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.runs", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="default: experiments")
    parser.add_argument("--csv", action="store_true", help="all columns, in full precision")
    options = parser.parse_args(argv)
    runs = read(options.folders or [PROJECT / "experiments"])
    ranked = compare.rank_runs(runs)
    runs = [run for group in ranked for run in group] + [run for run in runs if not run.best]
    keys = compare.differing(runs)
    rows = [row_of(run, keys) for run in runs]
    names = columns(rows, keys)
    if options.csv:
        write_csv(rows, names)
        return 0
    verdict = compare.conclusion(ranked) or ["No run has a best validation yet."]
    print(table(rows, names), *verdict, sep="\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:  # not through `report_errors`, which imports PyTorch: seconds for a table
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
