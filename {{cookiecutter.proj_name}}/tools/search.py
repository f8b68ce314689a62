"""Search for good values with Optuna: python -m tools.search --config FILE --random KEY=RANGE ... --trials 30

Each trial is a run in experiments/<name>/. One whose validation is worse than that of most others at the same step is
stopped early. The same command continues a search that was stopped or killed; more --trials extend it.
"""

import sys

from common.failure.program import exit_process, report_errors
from tools.sweep.__main__ import main

if __name__ == "__main__":
    with report_errors():
        exit_process(main(["--optuna", *sys.argv[1:]]))
