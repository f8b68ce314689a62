"""Try the guarantees on your own code: python -m tools.check --config FILE [--key value ...]

Shortened runs of the config are stopped, killed, resumed, split among processes and repeated, and compared. What does
not hold is shown with the first step and tensor that differ. Exit code 0: all hold; 1: one does not; 2: the config does
not train.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common.monitor.log import setup_log
from cli.program import run
from cli.stored_config import train_config
from tools.check.checks import CHECKS
from tools.check.lab import SAMPLES, STEPS, Lab

_WORDS = {"holds": "holds", "fails": "does NOT hold", "not applicable": "does not apply"}


def main(argv: list[str]) -> int:
    """Make the runs, and print what each check finds. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.check", description=(__doc__ or "").partition("\n\n")[2])
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and the rest to stderr")
    options, words = parser.parse_known_args(argv)
    setup_log()
    config = train_config(words, prog="python -m tools.check", description=__doc__ or "").config
    say = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    chosen = [check for check in CHECKS if check.name in options.only]
    width = max(len(check.title) for check in chosen)
    outcomes = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        lab = Lab(words, config, Path(folder))
        say(f"trains {STEPS} steps of {SAMPLES} samples, and again for each comparison\n")
        lab.train("uncut")
        for check in chosen:
            result = check.result(lab)
            say(f"{check.title:<{width}}  {_WORDS[result.outcome]:<14}  {check.name}")
            if result.why:
                say(f"    {result.why}" if result.step is None else f"    step {result.step}: {result.why}")
            outcomes.append({"name": check.name, **asdict(result)})
    if options.json:
        print(json.dumps({"checks": outcomes}, indent=2))
    return int(any(entry["outcome"] == "fails" for entry in outcomes))


if __name__ == "__main__":
    run(main)
