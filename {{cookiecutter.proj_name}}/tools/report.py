"""Write report.html into the folders of runs: python -m tools.report RUN [RUN ...]

A finished run has it already. This writes it for runs that were stopped or are still running, and again after an
evaluation.
"""

import argparse
import sys
from pathlib import Path

from common.base.errors import UserError
from common.base.files import output_file, write_text
from common.config.problem import shown_path
from tools.runs import compare
from tools.runs.report import FILE, report


def main(argv: list[str]) -> int:
    """Read the command line and the runs, and write the pages. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.report", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of several")
    for folder in parser.parse_args(argv).runs:
        for run in compare.find_runs(folder):
            file = run.path / FILE
            with output_file(file):
                write_text(file, report(run))
            print(shown_path(file))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:  # not through `report_errors`, which imports PyTorch: seconds for a page
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
