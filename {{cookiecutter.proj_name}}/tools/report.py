"""Write the report of a run, or one page that shows several side by side: python -m tools.report RUN [RUN ...]

A finished run has its report.html already. This writes it for runs that were stopped or are still running, and again
after an evaluation.
"""

import argparse
import os
import sys
from pathlib import Path

from common.base.errors import UserError
from common.base.files import output_file, write_text
from common.config.problem import shown_path
from tools.runs import compare
from tools.runs.report import FILE, report


def main(argv: list[str]) -> int:
    """Read the command line and the runs, and write the page. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.report", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of several")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"default: RUN/{FILE}; for several runs, compare.html beside them"
    )
    options = parser.parse_args(argv)
    by_path = {run.path.resolve(): run for folder in options.runs for run in compare.find_runs(folder)}
    runs = list(by_path.values())
    beside = Path(os.path.commonpath([path.parent for path in by_path]))
    out: Path = options.out or (runs[0].path / FILE if len(runs) == 1 else beside / "compare.html")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name a file, such as {out / FILE}")
    page = report(runs)
    with output_file(out):
        write_text(out, page)
    print(f"{shown_path(out)}: {', '.join(run.name for run in runs)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:  # not through `report_errors`, which imports PyTorch: seconds for a page
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
