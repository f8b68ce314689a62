"""How long training is blocked by saving a 500 MB state in the background, against a plain synchronous torch.save.

Both write to the same folder, in turn; the writer is idle again before each measurement.  Run:  python bench/save.py
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.proj_name}}"
sys.path.insert(0, str(PROJECT))

import torch  # noqa: E402
from common.checkpoint.folder import CheckpointFolder  # noqa: E402
from common.checkpoint.saver import CheckpointConfig, Saver  # noqa: E402
from common.distributed import Rank  # noqa: E402


def main() -> None:
    """Measure, and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=500)
    options = parser.parse_args()
    count = 50
    model = {f"layer{n}": torch.rand(options.megabytes * 250_000 // count) for n in range(count)}
    state = {"format": 1, "model": model, "position": {"step": 1}}
    plain, blocked, whole = [], [], []
    with tempfile.TemporaryDirectory() as name:
        saver = Saver(CheckpointFolder(Path(name)), CheckpointConfig(), Rank())
        for _ in range(options.runs + 1):
            start = time.perf_counter()
            torch.save(state, Path(name) / "plain.pt")
            plain.append(time.perf_counter() - start)
            start = time.perf_counter()
            saver.save(state)
            blocked.append(time.perf_counter() - start)
            saver.wait()
            whole.append(time.perf_counter() - start)
    first = blocked[0]
    # The first save allocates the memory that the others use again.
    plain, blocked, whole = plain[1:], blocked[1:], whole[1:]
    medians = [statistics.median(times) for times in (plain, blocked, whole)]
    print(f"{options.megabytes} MB, {options.runs} saves each")
    print(f"torch.save           {medians[0]:6.3f} s (median)")
    print(f"background, blocked  {medians[1]:6.3f} s; the first one {first:.3f} s")
    print(f"background, on disk  {medians[2]:6.3f} s, with fsync and rename")
    print(f"ratio                {medians[1] / medians[0]:.3f} of medians, blocked to torch.save")


if __name__ == "__main__":
    main()
