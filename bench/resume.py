"""Time to the first batch of an epoch of 10 million samples: from its start, and resumed when 90 % of it are done.

Run:  python bench/resume.py
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.proj_name}}"
sys.path.insert(0, str(PROJECT))

import torch  # noqa: E402
from common.data.loader import LoaderConfig, TrainStream  # noqa: E402
from common.data.order import EpochOrder, EpochPlan  # noqa: E402
from common.progress import Position  # noqa: E402


class Numbers:
    """So many samples, none of which costs anything."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def first_batch(size: int, sample: int) -> float:
    """Seconds from nothing to the first batch."""
    start = time.perf_counter()
    dataset = Numbers(size)
    order = EpochOrder({"type": "shuffle"}, dataset, seed=1)
    plan = EpochPlan(size, batch_size=100)
    stream = TrainStream(dataset, order, plan, LoaderConfig(), worker=0, device=torch.device("cpu"))
    next(stream.epoch(Position(step=sample // 100, sample=sample, epoch_size=size)))
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--size", type=int, default=10_000_000)
    options = parser.parse_args()
    first_batch(options.size, 0)
    pairs = [
        (first_batch(options.size, 0), first_batch(options.size, options.size * 9 // 10)) for _ in range(options.runs)
    ]
    start, resumed = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"{options.size:,} samples, {options.runs} pairs")
    print(f"from the start   {start:6.3f} s (median)")
    print(f"resumed at 90 %  {resumed:6.3f} s")
    print(f"ratio            {resumed / start:.3f} of medians")


if __name__ == "__main__":
    main()
