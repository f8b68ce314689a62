"""Throughput of the rendered project's trainer on 1 and 2 ranks (gloo, CPU), against a bare DDP loop.

The shipped model on random digits, AdamW, batch 64 per rank, all default features on. In the same processes, segments
of the two alternate, so that both see the same machine; the ratio is that of the medians of rank 0. Then the price of
the agreement to stop, one small exchange some times a second.  Run:  python bench/ddp.py [--segments N] [--steps N]
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.proj_name}}"
sys.path.insert(0, str(PROJECT))
sys.path.insert(0, str(Path(__file__).parent))

from common.build import build_run  # noqa: E402
from common.config import resolve  # noqa: E402
from common.distributed import Rank, barrier  # noqa: E402
from common.failure.signals import StopSignals  # noqa: E402
from common.run_context import managed_run  # noqa: E402
from common.trainer import Trainer  # noqa: E402
from custom.config import Config  # noqa: E402
from custom.models.conv_model import ConvModel  # noqa: E402
from loop import Alternating, bare_steps  # noqa: E402

BATCH = 64
SAMPLES = int(os.environ.get("BENCH_SAMPLES", "0"))  # set for the processes that measure


class Images:
    """Random images of 8 x 8 with random labels: learning is not the point here."""

    random = False

    def __init__(self, data_dir: Path, mode: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(SAMPLES, 1, 8, 8, generator=generator)
        self.labels = torch.randint(10, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


def bare_loop(segment: int, rank: Rank) -> Iterator[float]:
    """Seconds per step of what everybody writes first, a segment at a time."""
    torch.manual_seed(0)
    model: nn.Module = ConvModel(1, 10, 32, 0.1)
    sampler = None
    data: Any = Images(Path(), "train")
    if not rank.is_single_process:
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    loader: DataLoader[Any] = DataLoader(data, batch_size=BATCH, sampler=sampler, shuffle=sampler is None)
    yield from bare_steps(segment, model, optimizer, loader)


def measure(number: int, world: int, port: int, options: argparse.Namespace, folder: str) -> None:
    """Measure in one process: alternate, then time the agreement; rank 0 prints."""
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    words = [
        "--name", "bench", "--dir.runs_dir", folder, "--dataset", "{train: {type: ddp.Images}, val: null, eval: null}",
        "--progress.max_steps", str((options.segments + 1) * options.steps + 1), "--progress.epoch", "null",
        "--optim.args", "{fused: true}",
    ]  # fmt: skip
    resolved = resolve(Config, [PROJECT / "configs" / "default.yaml"], words)
    config = resolved.config
    with managed_run(config, resolved, words) as run:
        built = build_run(config, run.rank)
        run.open()
        trainer = Trainer(config, built, run)
        stream = trainer.stream
        stream.__class__ = Alternating
        assert isinstance(stream, Alternating)
        stream.arm(options.steps, bare_loop(options.steps, run.rank))
        trainer.train()
        agreement = agreement_time(run.rank)
        if run.rank.is_main:
            report(world, stream, agreement)


def agreement_time(rank: Rank, calls: int = 100) -> float:
    """Seconds of one exchange of the ranks on whether to stop, answered at once, with nothing else going on."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        StopSignals(rank).sync(save=False)  # the first call asks
        barrier(rank)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def report(world: int, stream: Alternating, agreement: float) -> None:
    """Medians, their ratio, and the share of the agreement."""
    ours, bare = statistics.median(stream.trainer_times), statistics.median(stream.other_times)
    pairs = sorted(b / a for a, b in zip(stream.trainer_times, stream.other_times, strict=True))
    print(
        f"{world} rank(s): trainer {ours * 1e3:.3f} ms, bare {bare * 1e3:.3f} ms per step; throughput "
        f"{bare / ours:.3f} of the bare loop's (pairs {pairs[0]:.3f} to {pairs[-1]:.3f}); "
        f"one agreement {agreement * 1e6:.0f} us, about 5 times a second: {5 * agreement:.2%} of the time",
        flush=True,
    )


def main() -> None:
    """Measure on 1 and on 2 ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps per segment")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    options = parser.parse_args()
    print(f"{options.segments} segments of {options.steps} steps, torch {torch.__version__}, 1 thread per rank")
    for world in options.ranks:
        # One epoch: no validation and no checkpoint in between.
        os.environ["BENCH_SAMPLES"] = str((options.segments + 2) * options.steps * BATCH * world)
        with tempfile.TemporaryDirectory() as folder:
            port = 20000 + os.getpid() % 10000
            torch.multiprocessing.spawn(_start, (world, port, options, folder), nprocs=world)


def _start(number: int, *arguments: Any) -> None:
    sys.modules["ddp"] = sys.modules[__name__]  # by this name the config finds the dataset
    measure(number, *arguments)


if __name__ == "__main__":
    main()
