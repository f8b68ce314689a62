"""Replay a run and certify its bits: python -m tools.verify RUN [--from start|CHECKPOINT] [--anyway]

Before it trains anything it compares what decides the bits: the code, the packages and the data. What has changed is
named, and refused. Then it trains from one checkpoint to the newest one, in a temporary folder, and compares the
weights at each save, every measurement, and all that the newest checkpoint holds. RUN/certificate.json says what was
compared and what was equal. Exit code 0: verified; 1: something differs; 2: refused, or nothing can be replayed.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from common.base.files import without_tilde, write_text
from common.checkpoint.checksum import weights_digest
from common.monitor.log import setup_log
from common.run.paths import RunPaths
from common.run.status import now
from cli.program import run
from cli.trained import config_in
from tools.same.folders import differences
from tools.verify.replay import recorded, replay, replay_config
from tools.verify.stored import Segment, compare_causes, read_segment

VERDICTS = ("verified", "differs", "refused")  # by exit code


def main(argv: list[str]) -> int:
    """Verify the run of the command line, write its certificate, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--from", dest="start", help="start, or a checkpoint; by default the oldest one that is kept")
    parser.add_argument("--anyway", action="store_true", help="replay what has changed, and say how far apart it is")
    options = parser.parse_args(argv)
    setup_log("ERROR")
    paths = RunPaths(without_tilde(options.run, "RUN").resolve())
    segment = read_segment(paths, options.start)
    certificate: dict[str, Any] = {
        "run": paths.name,
        "date": now(),
        "from": {"file": segment.name, "step": segment.first},
        "to": {"step": segment.last, "weights": weights_digest(segment.end)},
    }
    code = certify(segment, certificate, anyway=options.anyway)
    file = paths.root / "certificate.json"
    write_text(file, json.dumps({**certificate, "verdict": VERDICTS[code]}, indent=2) + "\n")
    print(f"wrote {file}")
    return code


def certify(segment: Segment, certificate: dict[str, Any], *, anyway: bool) -> int:
    """Compare what decides the bits, replay, and compare the bits. Fills the certificate, and returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        config = replay_config(segment, Path(folder))
        causes = compare_causes(segment, config_in({"about": {"config": config}}).config)
        certificate |= causes
        for title, lines in causes.items():
            if lines:
                print("\n  ".join([f"{title}:", *lines]))
        if causes["changed"] and not anyway:
            print("refused: undo these changes, or see how far apart a replay ends: --anyway")
            return 2
        trained, replayed = recorded(segment.rows, segment.end), replay(segment, config, Path(folder))
    different = [line for kind, a in trained.items() for line in differences(kind, a, replayed[kind], a)]
    counts = {kind: len(values) for kind, values in trained.items()}
    certificate |= {"compared": counts, "different": different}
    what = ", ".join(f"{count} {kind.removesuffix('s') if count == 1 else kind}" for kind, count in counts.items())
    if different:
        print("\n  ".join([f"differs: compared {what}; A is the run, B its replay", *different]))
        return 1
    print(f"verified: {what} are equal to the last bit")
    return 0


if __name__ == "__main__":
    run(main)
