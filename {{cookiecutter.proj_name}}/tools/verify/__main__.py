"""Replay a run and compare its bits: python -m tools.verify RUN [--from start|CHECKPOINT]

Trains from one checkpoint to the newest one again, in a temporary folder, and compares every measurement and all that
the newest checkpoint holds; and the code, packages, machine and data of both, whose differences are named. Exit code
0: verified; 1: something differs; 2: nothing can be replayed.
"""

import argparse
import tempfile
from pathlib import Path

from common.checkpoint.resume import compare
from common.monitor.log import setup_log
from common.run.paths import RunPaths
from cli.program import run
from tools.same.folders import differences
from tools.verify.replay import read_segment, recorded, replay


def main(argv: list[str]) -> int:
    """Verify the run of the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--from", dest="start", help="start, or a checkpoint; by default the oldest one that is kept")
    options = parser.parse_args(argv)
    setup_log("ERROR")
    paths = RunPaths(options.run.expanduser().resolve())
    segment = read_segment(paths, options.start)
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        rows, end = replay(segment, Path(folder))
    trained = recorded(segment.rows, segment.end)
    again = recorded(rows, end)
    different = [line for kind, values in trained.items() for line in differences(kind, values, again[kind], values)]
    found = compare(segment.end["fingerprint"], end["fingerprint"])
    what = ", ".join(f"{len(values)} {kind}" for kind, values in trained.items())
    if different:
        print("\n  ".join([f"differs: compared {what}; A is the run, B its replay", *different]))
    else:
        print(f"verified: {what} are equal to the last bit")
    for title, lines in (("changed since the run", found.samples + found.bits), ("not compared", found.unknown)):
        if lines:
            print("\n  ".join([f"{title}:", *lines]))
    print(f"also compared: {', '.join(found.compared)}")
    return int(bool(different))


if __name__ == "__main__":
    run(main)
