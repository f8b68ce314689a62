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
from pathlib import Path

from common.base.errors import UserError
from common.base.text import to_json
from common.failure.program import report_errors
from tools.same.folders import compare
from tools.same.sides import Side
from tools.same.trained import Finding, compare_trained

_STEPS = 20
_UNSTABLE = 2


def main(argv: list[str]) -> int:
    """Compare A and B of the command line, and print what was compared or how they differ. Returns the exit code."""
    about = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(prog="python -m tools.same", description=about, allow_abbrev=False)
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
        if given.steps < 1:
            raise UserError(f"--steps {given.steps}: must be at least 1")
        if (first.kind == "commit") == (given.config is None):
            raise UserError("two commits need --config FILE" if given.config is None else "--config is for two commits")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as after Ctrl-C, the temporary folder is removed
        with tempfile.TemporaryDirectory(prefix="same-") as folder:
            finding = compare_trained(sides, given.config, given.steps, words, Path(folder).resolve(), _say)
    print(to_json(_values(sides, finding)) if given.json else "\n".join(_lines(sides, finding)))
    return _UNSTABLE if finding.unstable else 0 if finding.is_same else 1


def _lines(sides: Sequence[Side], finding: Finding) -> list[str]:
    """The result for people."""
    found = finding.difference
    if finding.is_same:
        return [f"same: {finding.what}"]
    if found is None:
        return [f"different: compared {finding.what} of A = {sides[0]} and B = {sides[1]}", *finding.lines]
    place = f"{'step ' + str(found.step) if found.step else 'what the runs begin with'}: {found}"
    if side := finding.unstable:
        words = place.replace("in A", "at first").replace("in B", "then")
        return [f"cannot compare: {side} differs from itself, trained twice; first in {words}",
                "  a source of random numbers without a seed, or an operation that is not deterministic"]  # fmt: skip
    return [f"different: first in {place}", f"  {finding.meaning}", f"  compared: {finding.what}; each side is equal to"
            " itself, trained twice"]  # fmt: skip


def _values(sides: Sequence[Side], finding: Finding) -> dict[str, object]:
    """The result for programs."""
    found = finding.difference
    about = {name: getattr(found, name) for name in ("step", "kind", "name", "rank", "distance")} if found else {}
    return {
        "same": finding.is_same,
        "a": sides[0].text,
        "b": sides[1].text,
        "compared": finding.what,
        "unstable": finding.unstable or None,
        "difference": {**about, "words": str(found), "meaning": finding.meaning} if found else None,
        "lines": list(finding.lines),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
