"""Compare two runs, commits or configs to the last bit: python -m tools.same A B [--config FILE] [--key value ...]

A and B are the folders of two runs, whose measurements and last checkpoints are compared; two configs; or two commits
of the project, such as HEAD~3, a tag, or . for the files as they are now, with --config. Commits and configs are
trained for some steps in a temporary folder, with all further words, and every tensor of every step is compared. If
one differs, both are trained again, to name the first module or gradient that does, and to see whether each is equal to
itself. Exit code 0: the same; 1: something differs; 2: nothing can be compared.
"""

import argparse
import signal
import tempfile
from pathlib import Path

from common.base.errors import UserError
from cli.program import run
from tools.same.folders import compare
from tools.same.sides import Side
from tools.same.trained import compare_trained

_EXIT_CODES = {"same": 0, "different": 1, "cannot be compared": 2}


def main(argv: list[str]) -> int:
    """Compare A and B of the command line, and print what was compared or how they differ. Returns the exit code."""
    text = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(prog="python -m tools.same", description=text, allow_abbrev=False)
    parser.add_argument("sides", nargs=2, metavar="A_OR_B", help="two folders of runs, two configs, or two commits")
    parser.add_argument("--config", metavar="FILE", help="of commits; each commit is trained with its own version")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train; 20 unless given")
    given, words = parser.parse_known_args(argv)
    first, second = sides = [Side.parse(text) for text in given.sides]
    if first.kind != second.kind:
        raise UserError(f"{first} is a {first.kind} and {second} a {second.kind}; A and B must be of one kind")
    if (first.kind == "commit") != (given.config is not None):
        raise UserError("two commits need --config FILE; runs and configs are compared without it")
    if first.kind == "run":
        if words:
            raise UserError(f"two runs are compared as they are, without {words[0]}; or compare their configs")
        compared, lines = compare(first.path, second.path)
        result = "different" if lines else "same"
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as after Ctrl-C, the temporary folder is removed
        with tempfile.TemporaryDirectory(prefix="same-") as folder:
            result, compared, lines = compare_trained(sides, given.config, given.steps, words, Path(folder).resolve())
    heading = f"{result}; compared: {compared}" if lines else f"{result}: {compared}"
    print("\n".join([heading, *lines]))
    return _EXIT_CODES[result]


if __name__ == "__main__":
    run(main)
