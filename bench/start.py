"""Time from the command to the end of the first optimizer step: train.py against a script that imports torch and steps.

Both processes leave at once when their first step is done; they are started in turn. Run:  python bench/start.py
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BENCH = Path(__file__).resolve().parent
PROJECT = BENCH.parent / "{{cookiecutter.proj_name}}"
BARE = """
import os
import torch
from torch import nn
model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss = nn.functional.cross_entropy(model(torch.rand(64, 1, 8, 8)), torch.randint(10, (64,)))
loss.backward()
optimizer.step()
os._exit(0)
"""


def leave(output, batch):  # type: ignore[no-untyped-def] # a loss, named in the config as start.leave
    """Cross entropy; the second call means that the first step is done."""
    import torch

    if getattr(leave, "called", False):
        os._exit(0)
    leave.called = True  # type: ignore[attr-defined]
    return torch.nn.functional.cross_entropy(output["logits"], batch["label"])


def seconds(command: list[str]) -> float:
    """Wall time of a process that has to succeed."""
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": f"{BENCH}", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as at a user's second start: nothing is compiled again
    subprocess.run(command, cwd=PROJECT, env=environment, check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loss = ["--loss", "{leave: {type: start.leave}}"]
        ours = [sys.executable, "train.py", "--config", "configs/default.yaml", "--dir.runs_dir", folder, *loss]
        bare = [sys.executable, "-c", BARE]
        seconds(ours), seconds(bare)  # warm the disk cache
        pairs = [(seconds(ours), seconds(bare)) for _ in range(options.runs)]
    ours_median, bare_median = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"{len(pairs)} pairs of processes")
    print(f"train.py {ours_median:6.3f} s to the end of the first step (median)")
    print(f"bare     {bare_median:6.3f} s")
    print(f"ratio    {ours_median / bare_median:.3f} of medians")


if __name__ == "__main__":
    main()
