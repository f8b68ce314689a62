"""Samples/s, TFLOP/s and MFU of the project's trainer on a GPU, against a bare loop, in bf16, compiled and not.

For ResNet-50, ViT-S/16 and GPT-2 124M. Both sides have the same model, first weights, optimizer, batches and precision,
and the trainer has all that is on by default. Segments of the two alternate in one process, and both wait for the
device at the ends of a segment; the ratio is that of their medians. `make bench-gpu` runs it and keeps the results.

FLOPs are those of matrix products and convolutions, counted once by torch for forward and backward; attention counts
in full, although a causal one needs half. MFU is their rate by the peak of the device for dense bf16 products, as
NVIDIA's data sheets have it (--peak for others). Beside it stands what a large matrix product reaches in this run.

    python bench/gpu.py [--models vit_s ...] [--modes eager compiled] [--segments N] [--steps N] [--device cpu --tiny]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_models
import loop  # finds the project
import torch
from common.build import build_run
from common.config import resolve
from common.data.loader import Step, TrainStream
from common.progress import Position
from common.run_context import managed_run
from common.task import Task
from common.trainer import Trainer
from custom.config import Config
from gpu_models import SHAPES, Shape, Trained
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

MODES = ("eager", "compiled")
# TFLOP/s of dense bf16 products, from NVIDIA's data sheets; the first name that the device's contains.
PEAKS = {
    "H100 NVL": 835.5, "H100 PCIe": 756.5, "H100": 989.4, "H200": 989.4, "GH200": 989.4, "B200": 2250.0, "A100": 312.0,
    "A40": 149.7, "A30": 165.0, "A10": 125.0, "L40S": 362.1, "L4": 121.0, "RTX A6000": 154.8, "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}  # fmt: skip
OUT_OF_MEMORY = 75  # exit code of a comparison for which the device has too little memory


class Numbers:
    """A dataset of nothing but the numbers of the samples, which lie on the device."""

    random = False
    size, pool = 0, gpu_models.POOL

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.numbers = torch.arange(self.size) % self.pool

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return self.numbers[index]


class Given(Task):
    """The model returns its loss."""

    def output(self, batch: Tensor) -> Tensor:
        return self.model(batch)

    def losses(self, output: Tensor, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": output}


class Alternating(TrainStream):
    """The trainer's own stream, which hands the device to the other loop after each segment and takes the times."""

    def arm(self, segment: int, other: Iterator[float], device: torch.device) -> None:
        self.segment, self.other, self.device = segment, other, device
        self.times: list[float] = []
        self.other_times: list[float] = []

    def epoch(self, at: Position) -> Iterator[Step]:
        start = time.perf_counter()
        for number, step in enumerate(super().epoch(at)):
            if number % self.segment == 0 and number:
                wait(self.device)
                self.times.append((time.perf_counter() - start) / self.segment)
                self.other_times.append(next(self.other))
                start = time.perf_counter()
            yield step


def wait(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build_model() -> Trained:
    """Build the model of this comparison; the config names this function."""
    shape, tiny = SHAPES[os.environ["BENCH_MODEL"]], os.environ["BENCH_TINY"] == "1"
    torch.manual_seed(0)
    return shape.tiny() if tiny else shape.samples(shape.bare())


def bare_loop(shape: Shape, batch: int, segment: int, device: torch.device, *, compiled: bool) -> Iterator[float]:
    """Seconds per step of what everybody writes first, a segment at a time."""
    model = build_model().to(device)
    run: Any = torch.compile(model) if compiled else model
    name, arguments = shape.optimizer
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-4, weight_decay=0.0, **arguments)
    loader: DataLoader[Any] = DataLoader(
        Numbers(Path(), "train"),  # type: ignore[arg-type]
        batch_size=batch,
        shuffle=True,
        pin_memory=device.type == "cuda",
    )
    batches = iter(loader)
    while True:
        wait(device)
        start = time.perf_counter()
        for _ in range(segment):
            numbers = next(batches).to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = run(numbers)
            loss.backward()
            optimizer.step()
        wait(device)
        yield (time.perf_counter() - start) / segment


def flops(batch: int) -> int:
    """Count the FLOPs of forward and backward of a batch, on a device that computes nothing."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = build_model().to("meta")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(batch, dtype=torch.long, device="meta")).backward()
    return int(counter.get_total_flops())


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Time one model in one mode, in this process."""
    shape, device, compiled = SHAPES[options.models[0]], torch.device(options.device), options.modes[0] == "compiled"
    batch, segment = options.batch or (4 if options.tiny else shape.batch), options.steps
    steps = (options.segments + 1) * segment + 1
    Numbers.size = (options.segments + 4) * segment * batch  # the bare loop has two more segments, to warm up
    Numbers.pool = 16 if options.tiny else gpu_models.POOL
    name, arguments = shape.optimizer
    words = [
        "--name", "bench", "--model", "{$REPLACE: true, type: gpu.build_model}", "--task", "{type: gpu.Given}",
        "--dataset", "{train: {type: gpu.Numbers}, val: null, eval: null}", "--loss", "null",
        "--metric", "{$REPLACE: true}",
        "--optim.optim_type", name, "--optim.args", json.dumps(arguments), "--optim.lr", "1.0e-4",
        "--batch_size", str(batch), "--gpu_ids", "0" if device.type == "cuda" else "-1", "--precision.mode", "bf16",
        "--prepare.compile.enabled", str(compiled).lower(),
        "--progress.max_steps", str(steps), "--progress.epoch", "null",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        words += ["--dir.runs_dir", folder]
        resolved = resolve(Config, [loop.PROJECT / "configs" / "default.yaml"], words)
        config = resolved.config
        with managed_run(config, resolved, words) as run:
            built = build_run(config, run.rank)
            count = sum(parameter.numel() for parameter in built.task.parameters())
            run.open()
            trainer = Trainer(config, built, run)
            other = bare_loop(shape, batch, segment, device, compiled=compiled)
            for _ in range(2):
                next(other)  # compiles, and finds its algorithms
            stream = trainer.stream
            stream.__class__ = Alternating
            assert isinstance(stream, Alternating)
            stream.arm(segment, other, device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            trainer.train()
    pairs = list(zip(stream.times, stream.other_times, strict=True))[1:]  # the first one compiles
    mine, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    work = flops(batch)
    return {
        "model": shape.name, "mode": options.modes[0], "batch": batch, "parameters": count, "flops": work,
        "step_s": mine, "bare_step_s": bare, "samples_per_s": batch / mine, "bare_samples_per_s": batch / bare,
        "tflops": work / mine / 1e12, "bare_tflops": work / bare / 1e12,
        "ratios": [ratios[0], mine / bare, ratios[-1]], "pairs": len(pairs),
        "peak_GiB_of_both": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }  # fmt: skip


def product_tflops(device: str, size: int) -> float:
    """TFLOP/s of a product of two square matrices in bf16, random ones: what this device reaches."""
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16).unbind()
    times = []
    for _ in range(12):
        wait(torch.device(device))
        start = time.perf_counter()
        a @ b
        wait(torch.device(device))
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times[2:]) / 1e12


def main() -> int:
    """Run each comparison in a process of its own; write and print what is known after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--segments", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps per segment")
    parser.add_argument("--batch", type=int, help="samples per step; default: each model's own")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: to try this program")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the device for dense bf16 products")
    parser.add_argument("--output", type=Path, help="file for the figures")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        try:
            options.output.write_text(json.dumps(compare(options)))
        except torch.OutOfMemoryError as error:
            print(error, file=sys.stderr)
            return OUT_OF_MEMORY
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("There is no NVIDIA GPU that PyTorch can use, so nothing was timed.")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    peak = options.peak or next((value for key, value in PEAKS.items() if key in name), None)
    reached = product_tflops(options.device, 256 if options.tiny else 8192)
    about = f"bf16, {options.segments} pairs of segments of {options.steps} steps"
    results: dict[str, Any] = {
        "settings": about, "device": name, "peak_tflops": peak, "product_tflops": reached, "rows": [],
    }  # fmt: skip
    print(f"{name}: {about}; peak {peak or 'unknown'} TFLOP/s, a matrix product reaches {reached:.4g}", flush=True)
    failures = 0
    for model in options.models:
        for mode in options.modes:
            row = separately(options, model, mode)
            failures += "error" in row
            if "error" not in row:
                row["mfu"] = row["tflops"] / peak if peak else None
                row["bare_mfu"] = row["bare_tflops"] / peak if peak else None
            results["rows"].append(row)
            if options.output:
                options.output.write_text(json.dumps(results))
            print(line(row), flush=True)
    return int(failures > 0)


def separately(options: argparse.Namespace, model: str, mode: str) -> dict[str, Any]:
    """Compare in a process of its own, with half the batch as long as the device has too little memory."""
    shape = SHAPES[model]
    batch = options.batch or (4 if options.tiny else shape.batch)
    with tempfile.TemporaryDirectory() as folder:
        while True:
            file = Path(folder, "row.json")
            command = [sys.executable, __file__, "--one", "--models", model, "--modes", mode, "--output", str(file)]
            command += ["--segments", str(options.segments), "--steps", str(options.steps), "--batch", str(batch)]
            command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
            environment = {**os.environ, "BENCH_MODEL": model, "BENCH_TINY": str(int(options.tiny))}
            done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode == 0:
                return dict(json.loads(file.read_text()))
            if done.returncode != OUT_OF_MEMORY or batch == 1:
                last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
                print(done.stderr, file=sys.stderr)
                return {"model": model, "mode": mode, "batch": batch, "error": last[0][:300]}
            batch //= 2


def line(row: dict[str, Any]) -> str:
    """Return a comparison as a line to read."""
    start = f"{row['model']:<9} {row['mode']:<9} batch {row['batch']:>3}  "
    if "error" in row:
        return start + row["error"]
    mfu = "" if row["mfu"] is None else f" MFU {row['mfu']:.1%},"
    low, middle, high = row["ratios"]
    return (
        f"{start}{row['samples_per_s']:9.1f} samples/s, {row['tflops']:7.4g} TFLOP/s,{mfu} bare loop "
        f"{row['bare_samples_per_s']:9.1f} samples/s; ratio of times {middle:.3f} (pairs {low:.3f} to {high:.3f})"
    )


if __name__ == "__main__":
    sys.modules["gpu"] = sys.modules["__main__"]  # by this name the config finds the dataset, the task and the model
    sys.exit(main())
