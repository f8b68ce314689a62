"""Compare two runs, commits or configs to the last bit: python -m tools.same A B [--config FILE] [--key value ...]

A and B are the folders of two runs, whose measurements and last checkpoints are compared; two configs; or two commits
of the project, such as HEAD~3, a tag, or . for the files as they are now, with --config. Commits and configs are
trained for some steps in a temporary folder, with all further words, and every tensor of every step is compared. If
one differs, both are trained again, to name the first module or gradient that does, and to see whether each is equal to
itself. Exit code 0: the same; 1: something differs; 2: nothing can be compared.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from common.base.errors import UserError
from common.base.text import to_json
from common.failure.program import report_errors
from tools.same.folders import compare
from tools.same.sides import Side
from tools.same.trained import Finding, compare_trained

_STEPS = 20
_UNSEEDED = "  it draws random numbers without a seed, or has an operation that is not deterministic"


def main(argv: list[str]) -> int:
    """Compare A and B of the command line, and print what was compared or how they differ. Returns the exit code."""
    text = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(prog="python -m tools.same", description=text, allow_abbrev=False)
    parser.add_argument("sides", nargs=2, metavar="A_OR_B", help="two folders of runs, two configs, or two commits")
    parser.add_argument("--config", metavar="FILE", help="of commits; each commit is trained with its own version")
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"optimizer steps to train; {_STEPS} unless given")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given, words = parser.parse_known_args(argv)
    first, second = sides = [Side.parse(text) for text in given.sides]
    if first.kind != second.kind:
        raise UserError(f"{first} is a {first.kind} and {second} a {second.kind}; A and B must be of one kind")
    if first.kind == "run":
        if words or given.config:
            raise UserError("two runs are compared as they are: leave out all other words, or compare their configs")
        finding = Finding(*compare(first.path, second.path))
    else:
        if (first.kind == "commit") == (given.config is None):
            raise UserError("two commits need --config FILE" if given.config is None else "--config is for two commits")
        say = partial(print, file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as after Ctrl-C, the temporary folder is removed
        with tempfile.TemporaryDirectory(prefix="same-") as folder:
            finding = compare_trained(sides, given.config, given.steps, words, Path(folder).resolve(), say)
    about = {"same": finding.is_same, "meaning": finding.meaning, **asdict(finding)}
    print(to_json(about) if given.json else "\n".join(_lines(sides, finding)))
    return 2 if finding.unstable else int(not finding.is_same)


def _lines(sides: Sequence[Side], finding: Finding) -> list[str]:
    """The result for people."""
    found = finding.difference
    if finding.is_same:
        return [f"same: {finding.what}"]
    if found is None:
        return [f"different: compared {finding.what} of A = {sides[0]} and B = {sides[1]}", *finding.lines]
    place = f"{f'step {found.step}' if found.step else 'what the runs begin with'}: {found}"
    if finding.unstable:
        place = place.replace("in A", "at first").replace("in B", "then")
        return [f"cannot compare: {finding.unstable} differs from itself, trained twice; first in {place}", _UNSEEDED]
    equal = f"  compared: {finding.what}; trained twice, A is equal to A, and B to B"
    return [f"different: first in {place}", f"  {finding.meaning}", equal]


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
