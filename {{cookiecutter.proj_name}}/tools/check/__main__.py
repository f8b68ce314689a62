"""Try the guarantees on your own code: python -m tools.check --config FILE [--key value ...]

Shortened runs of the config are stopped, killed, resumed, split among processes and repeated, and compared. What does
not hold is shown with the first step and tensor that differ, and with likely causes. Exit code 0: all hold; 1: one does
not; 2: the config does not train.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

from common.base.process import available_cores
from common.config.registry import REGISTRIES
from common.failure.program import report_errors
from common.monitor.log import setup_log
from cli.command_line import parse
from tools.check.checks import CHECKS, Check, Result
from tools.check.lab import Lab
from custom.config import Config

_WORDS = {"holds": "holds", "fails": "does NOT hold", "not applicable": "does not apply"}


def main(argv: list[str]) -> int:
    """Read the command line, make the runs, and print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.check", description=(__doc__ or "").partition("\n\n")[2])
    names = [each.name for each in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and the rest to stderr")
    options, words = parser.parse_known_args(argv)
    setup_log()
    config = parse(Config, words, prog="python -m tools.check", description=__doc__ or "", registries=REGISTRIES).config
    say = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    chosen = [each for each in CHECKS if each.name in options.only]
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        lab = Lab(words, config, Path(folder))
        results = run(lab, chosen, say)
    if options.json:
        print(json.dumps({"size": lab.size, "checks": [each.plain() for each in results]}, indent=2))
    return int(any(each.outcome == "fails" for each in results))


def run(lab: Lab, chosen: Sequence[Check], say: Callable[[str], None]) -> list[Result]:
    """Make the runs of the checks, and say what is done and what each found."""
    shorter = " ".join(f"{name} {value}" for name, value in lab.size.items())
    runs = 1 + sum(each.runs for each in chosen)
    say(f"a run of this size is made once, and {runs - 1} more are compared with it: {shorter}")
    seconds, at_once = lab.train("uncut").seconds, max(1, available_cores() // 3)
    minutes = math.ceil(seconds * runs / at_once / 60)
    say(f"it took {seconds:.0f} s, so all take about {minutes} min ({at_once} at once)\n")
    width, results, repeats = max(len(each.title) for each in chosen), list[Result](), None
    chosen = sorted(chosen, key=lambda each: each.name != "seed")  # first: what it finds is behind other findings too
    with ThreadPoolExecutor(at_once) as pool:
        first = [each.result(lab, None) for each in chosen[:1]]
        repeats = first[0].outcome == "holds" if first[0].name == "seed" else None
        for result in chain(first, pool.map(lambda check: check.result(lab, repeats), chosen[1:])):
            results.append(result)
            say(f"{result.title:<{width}}  {_WORDS[result.outcome]:<14}  {result.name}")
            found = result.finding
            if found.why:
                say(f"    {f'step {found.step}: ' if found.step is not None else ''}{found.why}")
            for suspect in result.suspects:
                say(f"    {suspect}")
    return results


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
