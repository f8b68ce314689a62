"""Try the guarantees on your own code: python -m tools.check --config FILE [--key value ...]

Shortened runs of the config are stopped, killed, resumed, split among processes and repeated, and compared. What does
not hold is shown with the first step and tensor that differ. Exit code 0: all hold; 1: one does not; 2: the config does
not train.
"""

import argparse
import tempfile
from pathlib import Path

from common.monitor.log import setup_log
from cli.command_line import parse
from cli.program import run, with_config_of_run
from tools.check.checks import CHECKS, FAILS
from tools.check.lab import SAMPLES, STEPS, Lab
from custom.config import Config


def main(argv: list[str]) -> int:
    """Make the runs, and print what each check finds. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.check", description=__doc__.partition("\n\n")[2])
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="+", action="extend", choices=names)
    options, words = parser.parse_known_args(argv)
    setup_log()
    words = with_config_of_run(words)
    config = parse(Config, words, prog="python -m tools.check").config
    chosen = [check for check in CHECKS if check.name in (options.only or names)]
    width = max(len(check.title) for check in chosen)
    code = 0
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        lab = Lab(words, config, Path(folder))
        print(f"trains {STEPS} steps of {SAMPLES} samples, and again for each comparison\n", flush=True)
        lab.train("uncut")
        for check in chosen:
            outcome, why = check.result(lab)
            print(f"{check.title:<{width}}  {outcome:<14}  {check.name}", *why, sep="\n    ", flush=True)
            if outcome == FAILS:
                code = 1
    return code


if __name__ == "__main__":
    run(main)
