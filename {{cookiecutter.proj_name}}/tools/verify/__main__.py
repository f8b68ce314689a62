"""Replay a run and certify its bits: python -m tools.verify RUN [--from start|CHECKPOINT] [--anyway]

Before it trains anything it compares what decides the bits: the code, the packages and the data. What has changed is
named, and refused. Then it trains from one checkpoint to the newest one, in a temporary folder, and compares the
weights at each save, every measurement, and all that the newest checkpoint holds. RUN/certificate.json says what was
compared and what was equal. Exit code 0: verified; 1: something differs; 2: refused, or nothing can be replayed.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from common.base.files import output_file, write_text
from common.config.names import join_names
from common.failure.program import report_errors
from common.monitor.log import setup_log
from common.run.paths import RunPaths
from common.run.status import now
from tools.verify.replay import compare_bits, replay
from tools.verify.stored import Segment, StoredRun, choose_segment, compare_evidence, read_run, replay_config

VERIFIED, DIFFERS, REFUSED = 0, 1, 2
_TITLES = {"damaged": "left out", "machine": "another machine", "not_compared": "not compared", "changed": "changed"}


def main(argv: list[str]) -> int:
    """Verify the run of the command line, write its certificate, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--from", dest="start", help="start, or a checkpoint; by default the oldest one that is kept")
    parser.add_argument("--anyway", action="store_true", help="replay what has changed, and say how far apart it is")
    options = parser.parse_args(argv)
    setup_log("ERROR")
    run = read_run(RunPaths(options.run.expanduser().resolve()))
    segment = choose_segment(run, options.start)
    names = ("file", "step", "weights", "recorded")
    kept = [(file.name, step, weights, run.recorded.get(step)) for step, (file, weights) in sorted(run.kept.items())]
    found: dict[str, Any] = {"format": 1, "run": run.paths.name, "date": now()}
    found["command"] = shlex.join(["python", "-m", "tools.verify", *argv])
    found["from"] = {"file": segment.start.name if segment.start else "start", "step": segment.first}
    found["to"] = {"file": segment.end.name, "step": segment.last}
    found["checkpoints"] = [dict(zip(names, each, strict=True)) for each in kept]
    code = certify(run, segment, found, anyway=options.anyway)
    found |= {"verdict": ("verified", "differs", "refused")[code], "exit": code}
    with output_file(run.paths.certificate_file):
        write_text(run.paths.certificate_file, json.dumps(found, indent=2) + "\n")
    print(f"wrote {run.paths.certificate_file}")
    return code


def certify(run: StoredRun, segment: Segment, found: dict[str, Any], *, anyway: bool) -> int:
    """Compare what decides the bits, replay, and compare the bits; say all of it, and note it in `found`."""
    if foreign := [each["file"] for each in found["checkpoints"] if each["recorded"] not in (None, each["weights"])]:
        print(f"differs: {join_names(foreign)}: other weights than metrics.jsonl recorded when they were saved")
        return DIFFERS
    config = replay_config(run, segment)
    found |= {"damaged": run.damaged, **compare_evidence(run, segment, config)}
    for name, title in _TITLES.items():
        if found[name]:
            print("\n  ".join([f"{title}:", *found[name]]))
    if found["changed"] and not anyway:
        print("refused: undo these changes, or see how far apart a replay ends: --anyway")
        return REFUSED
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        found |= {"versions": segment.attempt["versions"], "machine_of_run": segment.attempt["machine"]}
        found["compared"], found["different"] = compare_bits(run, segment, replay(run, segment, config, Path(folder)))
    what = ", ".join(f"{count} {name}" for name, count in found["compared"].items() if count)
    what += f" from step {segment.first} to step {segment.last}"
    if not found["different"]:
        print(f"verified: {what} are equal to the last bit")
        return VERIFIED
    print("\n  ".join([f"differs: compared {what}; A is the run, B its replay", *found["different"]]))
    return DIFFERS


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
