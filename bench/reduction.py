"""Price of `dist.reduction: fixed` on 1 and 2 ranks (gloo, CPU), in time per step and in memory, against the default.

Two trainers live in the same processes, one of each kind, with the same samples in a step; segments of their steps
alternate, so that both see the same machine, and the ratio is that of the medians of rank 0. The shipped model, whose
gradients are small, and a wide MLP, whose gradients (17 MB) cost as much as what computes them. Peak memory: each kind
in processes of its own.  Run:  python bench/reduction.py [--segments N] [--steps N] [--ranks 1 2] [--leaves 2 8]
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor, nn

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.proj_name}}"
sys.path.insert(0, str(PROJECT))

from common.build import build_run  # noqa: E402
from common.config import resolve  # noqa: E402
from common.run_context import RunContext, managed_run  # noqa: E402
from common.trainer import Trainer  # noqa: E402
from custom.config import Config  # noqa: E402

BATCH, SAMPLES = 16, 1 << 20
MODELS = {"shipped": "{type: ConvModel, in_channels: 1, classes: 10, width: 32}", "wide MLP": "{type: reduction.Wide}"}


class Wide(nn.Module):
    """64-2048-2048-10: 4.3 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU())
        self.head = nn.Linear(2048, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.layers(image.flatten(1)))


class Images:
    """As many images as one epoch takes, all alike: learning is not the point here."""

    random = False

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.image, "label": torch.tensor(index % 10)}


class Stepping:
    """A trainer of one kind, a segment of steps at a time."""

    def __init__(self, kind: str, model: str, leaves: int, run: RunContext, words: list[str]) -> None:
        share = leaves if kind == "fixed" else leaves // run.rank.world_size
        words = [*words, "--model", model, "--dist.reduction", kind, "--optim.accumulate", str(share)]
        config = resolve(Config, [PROJECT / "configs" / "default.yaml"], words).config
        self.trainer = Trainer(config, build_run(config, run.rank), run)
        self.trainer.task.train()
        self.data = self.trainer.stream.epoch(self.trainer.at)

    def seconds(self, steps: int) -> tuple[float, float]:
        """Take these steps. Returns the time of one, and that of the processor in this process."""
        start, computing = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step = next(self.data)
            self.trainer.optimizer_step(step, self.trainer.at)
            self.trainer.move_to(step.global_batch.after)
        return (time.perf_counter() - start) / steps, (time.process_time() - computing) / steps


@contextmanager
def joined(number: int, world: int, port: int, folder: str) -> Iterator[tuple[RunContext, list[str]]]:
    """Join a run as one of its processes. Yields it, and the words that its configs have in common."""
    sys.modules["reduction"] = sys.modules[__name__]  # by this name the config finds model and data
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    words = [
        "--name", "bench", "--dir.runs_dir", folder, "--batch_size", str(BATCH), "--num_workers", "0",
        "--dataset", "{train: {type: reduction.Images}, val: null, eval: null}", "--monitor.writers", "[]",
    ]  # fmt: skip
    resolved = resolve(Config, [PROJECT / "configs" / "default.yaml"], words)
    with managed_run(resolved.config, resolved, words) as run:
        run.open()
        yield run, words


def time_both(number: int, world: int, port: int, folder: str, options: argparse.Namespace) -> None:
    """One process: alternate, for each model and number of micro-batches; rank 0 prints."""
    with joined(number, world, port, folder) as (run, words):
        for name, model in MODELS.items():
            for leaves in options.leaves:
                pair = [Stepping(kind, model, leaves, run, words) for kind in ("default", "fixed")]
                for each in pair:
                    each.seconds(3)
                times = [[each.seconds(options.steps) for each in pair] for _ in range(options.segments)]
                if run.rank.is_main:
                    print(f"{world} rank(s), {name}, {leaves} micro-batches of {BATCH}: {report(times)}", flush=True)


def report(times: list[list[tuple[float, float]]]) -> str:
    """Medians and their ratio, of segments of both kinds: time, and time of the processor."""
    kinds = zip(*times, strict=True)
    (default, used), (fixed, used_fixed) = (map(statistics.median, zip(*each, strict=True)) for each in kinds)
    pairs = sorted(after / before for (before, _), (after, _) in times)
    return (
        f"default {default * 1e3:.2f} ms, fixed {fixed * 1e3:.2f} ms per step; ratio {fixed / default:.3f} of medians "
        f"(pairs {pairs[0]:.3f} to {pairs[-1]:.3f}), {used_fixed / used:.3f} of processor time"
    )


def peak(number: int, world: int, port: int, folder: str, kind: str, leaves: int, results: Any) -> None:
    """One process: its peak memory in MB after a few steps of the wide MLP."""
    with joined(number, world, port, folder) as (run, words):
        Stepping(kind, MODELS["wide MLP"], leaves, run, words).seconds(3)
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found and run.rank.is_main:
            results.put(int(found[1]) / 1024)


def start(function: Any, world: int, *arguments: Any) -> None:
    """Run `function` in `world` processes."""
    with tempfile.TemporaryDirectory() as folder:
        port = 20000 + (os.getpid() + time.monotonic_ns()) % 10000
        torch.multiprocessing.spawn(function, (world, port, folder, *arguments), nprocs=world)


def main() -> None:
    """Measure time, then memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps per segment")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--leaves", type=int, nargs="*", default=[2, 8], help="micro-batches of a step, over all ranks")
    options = parser.parse_args()
    print(f"{options.segments} segments of {options.steps} steps, torch {torch.__version__}, 1 thread per rank")
    for world in options.ranks:
        start(time_both, world, options)
    for world in options.ranks:
        for leaves in options.leaves:
            results = torch.multiprocessing.get_context("spawn").SimpleQueue()
            for kind in ("default", "fixed"):
                start(peak, world, kind, leaves, results)
            default, fixed = results.get(), results.get()
            print(
                f"{world} rank(s), wide MLP, {leaves} micro-batches: peak memory {default:.0f} MB, fixed {fixed:.0f} "
                f"MB: {fixed - default:+.0f} MB, where the gradients have 17 MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
