"""Compare runs in a table: python -m tools.runs [FOLDER ...]

A row has the state of a run, its best validation, its time, the config keys that differ between the runs, and other
results. `val` are the results of the best validation, `eval` those of the last evaluation during training.
"""

import argparse
import csv
import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from common.base.errors import UserError
from common.base.text import number, plain
from common.config.names import join_names
from common.run.paths import PROJECT
from tools.runs import compare
from tools.runs.read import RunFiles

_WIDEST = 32  # characters of a cell, where lines have a limit


class Row:
    """One run of the table.

    Attributes:
        name: its path below the folder that was searched.
        config: the keys that differ among the runs, as far as this one has them.
        values: the columns by name; missing where the run has none.
    """

    def __init__(self, run: RunFiles, name: str, keys: Sequence[str]) -> None:
        self.run, self.name, self.ranking, self.results = run, name, compare.ranking(run), compare.results(run)
        self.seconds, self.epoch = compare.seconds(run), compare.epoch(run)
        self.work = {"device_hours": compare.device_hours(run), **compare.speed(run)}
        self.config = {key: run.config[key] for key in keys if key in run.config}
        best = {"best": run.best["value"], "at": run.best["step"]} if run.best else {}
        remarks = [" ".join(part.split()) for part in (run.reason, *run.problems) if part not in ("", run.state)]
        self.values: dict[str, Any] = {"run": name, "state": run.state, **best, **self.config, **self.results}
        self.values |= {"step": run.step, "epoch": self.epoch, "time": self.seconds, **self.work}
        self.values |= {"remark": "; ".join(remarks)} if remarks else {}

    def record(self) -> dict[str, Any]:
        """Return the run for --json."""
        about = {name: getattr(self.run, name) for name in ("path", "state", "reason", "step", "best", "problems")}
        about |= {"path": str(self.run.path), "epoch": self.epoch, "seconds": self.seconds, **self.work}
        return {"run": self.name, **about, "values": self.results, "config": self.config}


def read(folders: Sequence[Path], *, failed: bool = False) -> tuple[list[Row], list[RunFiles]]:
    """Read the runs in the folders; and apart from them those that failed before their first step, unless `failed`.

    Raises `UserError` if a folder has no run.
    """
    runs = {run.path.resolve(): (run, folder) for folder in folders for run in compare.find_runs(folder)}
    left_out = [] if failed else [run for run, _ in runs.values() if compare.is_failed_start(run)]
    named = {}
    for run, folder in runs.values():
        below = run.name if run.path == folder else str(run.path.relative_to(folder))
        named[below if len(folders) == 1 else str(run.path)] = run
    named = {name: run for name, run in named.items() if run not in left_out}
    keys = compare.differing(list(named.values()))
    return [Row(run, name, keys) for name, run in named.items()], left_out


def columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns that the rows have, the most important first: best, a metric, time, learning rates, the model.

    The last ones say on what data and machine a run was made.
    """
    names = dict.fromkeys(name for row in rows for name in row.results)
    results = sorted(names, key=lambda name: (name.lower().endswith("loss"), name.startswith("eval.")))
    metric = max(results, key=lambda name: sum(name in row.results for row in rows), default="")
    keys = list(dict.fromkeys(key for row in rows for key in row.config))
    keys.sort(key=lambda key: (not key.endswith(".lr"), not key.startswith("model."), not key.startswith("optim.")))
    last = [key for key in keys if key.startswith(("dataset.", "dist."))]
    middle = [*(key for key in keys if key not in last), *results, "at", "step", "epoch"]
    work = [name for row in rows for name in row.work]
    ordered = dict.fromkeys(["run", "state", "best", metric, "time", *middle, *work, *last])
    return [name for name in (*ordered, "remark") if any(name in row.values for row in rows)]


def sort_rows(rows: Sequence[Row], by: str, *, backwards: bool = False) -> list[Row]:
    """Return the rows sorted by a column: results with the best one first, all else rising; rows without a value last.

    With `best`, only runs with the same metric, computed alike on the same validation data, are compared.

    Raises:
        UserError: there is no such column.
    """
    names = columns(rows)
    keys = [name for name in names if by in (name, name.rpartition(".")[2])]
    if by not in keys and len(keys) != 1:
        raise UserError(f"--sort {by}: {'this is one of' if keys else 'choose one of'}: {', '.join(keys or names)}")
    column = by if by in keys else keys[0]
    metric = column.partition(".")[2] if column.startswith(("val.", "eval.")) else ""

    def rank(row: Row) -> tuple[Any, ...]:
        value, group = row.values.get(column), row.ranking if column == "best" else ("", "", "")
        if value is None or value != value:  # NaN
            return group, 2
        if not isinstance(value, (int, float)):
            return group, 1, str(value)
        falls = bool(column == "best" or metric) and compare.mode(row.run, metric) == "max"
        return group, 0, -value if falls != backwards else value

    return sorted(rows, key=rank)


def table(rows: Sequence[Row], width: int | None = None) -> str:
    """Return the rows as text, in lines of at most `width` characters; None for any length."""
    metrics = {row.ranking[0] for row in rows if row.run.best}
    best = " ".join(["best", *metrics]) if len(metrics) == 1 else "best"
    repeated = {f"{split}.{name}" for name in compare.twins([row.run for row in rows]) for split in ("val", "eval")}
    names = [name for name in columns(rows) if name not in repeated | {best.replace("best ", "val.")}]
    ends = Counter(name.rpartition(".")[2] for name in names)
    texts = []
    for name in names:
        end = name.rpartition(".")[2]
        is_short = not name.startswith(("val.", "eval.")) and ends[end] == 1 and end != "type"
        cells = [best if name == "best" else end if is_short else name]
        cells += [_cell(row, name, with_metric=len(metrics) > 1)[: _WIDEST if width else None] for row in rows]
        is_number = all(isinstance(row.values.get(name, 0), (int, float)) for row in rows)
        texts.append([f"{cell:{'>' if is_number else '<'}{max(map(len, cells))}}" for cell in cells])
    count = sum(width is None or end - 2 <= width for end in accumulate(len(cells[0]) + 2 for cells in texts))
    lines = ["  ".join(cells).rstrip() for cells in zip(*texts[:count], strict=True)]
    more = [f"not shown: {join_names(names[count:])}; widen the terminal, or use --csv"] if names[count:] else []
    return "\n".join([*lines, *more])


def _cell(row: Row, name: str, *, with_metric: bool) -> str:
    if name not in row.values:
        return "-"
    if name == "best" or name in row.results:
        return f"{row.ranking[0]} " * (with_metric and name == "best") + number(row.values[name]).strip()
    return compare.duration(row.seconds) if name == "time" else compare.to_text(row.values[name])


def write_csv(rows: Sequence[Row]) -> None:
    """Write all columns in full precision to the standard output."""
    writer = csv.DictWriter(sys.stdout, [*columns(rows), "metric"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = {**row.values, "metric": row.ranking[0]}
        writer.writerow({name: json.dumps(item) if isinstance(item, list) else item for name, item in values.items()})


def main(argv: list[str]) -> int:
    """Read the command line and the runs, and print them. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.runs", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="default: experiments")
    parser.add_argument("--sort", metavar="COLUMN", help="as in val.Accuracy, optim.lr, lr, time; default: best")
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--csv", action="store_true", help="all columns, in full precision")
    parser.add_argument("--json", action="store_true", help="a list of objects")
    parser.add_argument("--failed", action="store_true", help="show starts too that failed before their first step")
    options = parser.parse_args(argv)
    rows, left_out = read(options.folders or [PROJECT / "experiments"], failed=options.failed)
    by = options.sort or ("best" if any(row.run.best for row in rows) else "run")
    rows = sort_rows(rows, by, backwards=options.reverse) if rows else []
    if options.json:
        print(json.dumps([plain(row.record()) for row in rows], indent=2, allow_nan=False, default=str))
    elif options.csv:
        write_csv(rows)
    elif rows:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        verdict = compare.conclusion([row.run for row in rows], [row.name for row in rows])
        lines = [f"{text}\n  {command}" if command else text for text, command in verdict]
        print(table(rows, width), *(lines or ["No run has a best validation yet."]), sep="\n")
    if left_out:
        text = f"{len(left_out)} start{'s' * (len(left_out) > 1)} that failed before the first step: see --failed"
        print(text, file=sys.stderr if options.json or options.csv else sys.stdout)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:  # not through `report_errors`, which imports PyTorch: seconds for a table
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
