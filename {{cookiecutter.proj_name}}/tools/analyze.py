"""What a model costs, on a batch of the config's own training data: python -m tools.analyze --config FILE

Parameters, floating point operations, memory kept for the backward pass, and time; of the task and of each module.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from common import distributed
from common.base.errors import UserError
from common.base.files import write_text
from common.build import build_stream, build_task
from common.config.registry import REGISTRIES
from common.distributed.process import set_up_process
from common.distributed.seed import choose_seed
from common.failure.program import leave, reported
from common.model import prepare
from common.monitor.log import setup_log
from common.optim.precision import build_precision
from common.run.paths import PROJECT, RunPaths
from common.task import Place
from cli.advice import explained
from cli.command_line import parse
from cli.stored_config import stored_config
from support.cost import Subject, measure, module_rows
from custom.config import Config

DTYPES: dict[str, Literal["fp32", "bf16", "fp16", "fp64"]] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float64": "fp64",
}
_PROFILE_WAIT = 10


def build(config: Config, size: int, dtype: str) -> Subject:
    """The task, and a batch of `size` samples. Raises `UserError` if there are not so many."""
    first, dist = config.in_stage(0), replace(config.dist, processes=None)
    gpu_ids = 0 if config.gpu_ids == "all" else config.gpu_ids
    rank = distributed.find_rank(gpu_ids[0] if isinstance(gpu_ids, list) else gpu_ids, dist)
    set_up_process(dist, rank)
    seed = choose_seed(dist, rank)
    stream = build_stream(replace(config, batch_size=size), rank, seed)
    if 0 < stream.epoch_size < size:
        raise UserError(f"--batch {size}: the training data has only {stream.epoch_size} samples")
    batch = stream.sample_batch(full=True)
    stream.close()
    precision = build_precision(replace(config.precision, mode=DTYPES[dtype]), rank.device)
    task = build_task(config, seed, rank, first_weights=False)
    # Compiled kernels cannot be assigned to modules.
    eager = replace(first.prepare, compile=replace(first.prepare.compile, enabled=False))
    prepare(task, eager, dist, precision, rank)
    task.at = Place(0, 0, None, stream.steps_per_epoch)
    task.loss.weigh(first.loss)
    batch = task.prepare_batch(precision.cast_batch(batch), rank.device)
    return Subject(task, batch, size, dtype, precision, rank.device)


def analyze(config: Config, sizes: Sequence[int], dtypes: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of every batch size and format, and of the modules for the first of them."""
    batches: list[dict[str, Any]] = []
    modules: list[dict[str, Any]] = []
    for dtype in dtypes:
        for size in sizes:
            subject = build(config, size, dtype)
            batches.append(measure(subject, options.repeat))
            modules = modules or module_rows(subject, options.repeat, options.depth)
    device = subject.device
    return {
        "task": config.task["type"],
        "model": config.model["type"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "parameters": modules[0]["parameters"],
        "trained": modules[0]["trained"],
        "batches": batches,
        "modules": modules,
    }


def report(result: dict[str, Any]) -> None:
    """Print the numbers as tables."""
    place = result["device"] + (f" with {result['threads']} threads" if result["device"] == "cpu" else "")
    print(f"{result['task']} with {result['model']} on {place}, torch {result['torch']}")
    count, trained = result["parameters"], result["trained"]
    print(f"parameters  {count:,}: {trained:,} trained, {count - trained:,} frozen")
    first = result["batches"][0]
    print(f"\nmodules, for a batch of {first['batch']} in {first['dtype']}")
    names = ["module", "type", "parameters", "FLOPs forward", "kept for backward", "time forward"]
    print_table(
        names,
        [
            [
                row["module"],
                row["type"],
                f"{row['parameters']:,}" + (" frozen" if row["parameters"] and not row["trained"] else ""),
                scaled(row["flops"]),
                scaled(row["saved_bytes"], "B"),
                milliseconds(row["seconds"]),
            ]
            for row in result["modules"]
        ],
    )
    print("\nbatches; of the times, the median and the range of the middle half")
    names = ["batch", "format", "FLOPs forward", "with backward", "kept", "time forward", "with backward", "samples/s"]
    has_peak = first["peak_bytes"] is not None
    rows = []
    for each in result["batches"]:
        times = [
            f"{milliseconds(middle)} ({1e3 * low:.2f}-{1e3 * high:.2f})"
            for low, middle, high in (each["seconds_forward"], each["seconds_train"])
        ]
        flops = scaled(each["flops_forward"]), scaled(each["flops_train"])
        rate = f"{each['batch'] / each['seconds_train'][1]:,.0f}"
        peak = [scaled(each["peak_bytes"], "B")] if has_peak else []
        rows.append([str(each["batch"]), each["dtype"], *flops, scaled(each["saved_bytes"], "B"), *times, rate, *peak])
    print_table([*names, *(["peak memory"] if has_peak else [])], rows)


def print_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; the first two are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        cells = [
            f"{cell:{'<' if at < 2 else '>'}{width}}" for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())


def scaled(number: float, unit: str = "") -> str:
    """A number with three digits and a prefix: 1.23 M."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.3g} P{unit}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def profile(config: Config, words: Sequence[str], steps: int) -> int:
    """Train a short run that records `steps` steps, see the config's section profile. Returns the exit code."""
    name = f"{config.name}_profile"
    given = [f"--name={name}", f"--profile.steps={steps}", f"--profile.wait={_PROFILE_WAIT}", "--progress.epoch=null"]
    given += [f"--progress.max_steps={steps + _PROFILE_WAIT}", "--monitor.writers=[]"]
    code = subprocess.run([sys.executable, str(PROJECT / "train.py"), *words, *given], check=False).returncode
    if code == 0:
        trace = RunPaths.for_run(config.dir, name, PROJECT).root / "profile.json"
        print(f"\nthe trace is {trace}; open it at https://ui.perfetto.dev")
    return code


def main(argv: list[str]) -> int:
    """Read the command line, measure, print. Returns the exit code."""
    setup_log("WARNING")
    found = argparse.ArgumentParser(
        prog="python -m tools.analyze", description=__doc__.splitlines()[0], allow_abbrev=False,
        epilog="All other options are settings of train.py.",
    )  # fmt: skip
    found.add_argument("--model_pt", metavar="FILE", help="a checkpoint, instead of --config")
    found.add_argument("--batch", help="batch sizes: 1,32; default: the config's batch_size")
    found.add_argument("--dtype", help=f"formats: {', '.join(DTYPES)}; default: the config's precision.mode")
    found.add_argument("--depth", type=int, default=2, help="levels of modules below the model; default 2")
    found.add_argument("--repeat", type=int, default=20, help="passes that are timed; default 20")
    found.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    found.add_argument("--profile", type=int, metavar="N", help="instead: record N training steps with torch.profiler")
    options, words = found.parse_known_args(argv)
    stored = stored_config(["--model_pt", options.model_pt], "--model_pt") if options.model_pt else None
    if options.model_pt and stored is None:
        raise UserError(f"--model_pt {options.model_pt}: there is no config.yaml in its run folder; give --config")
    words = [*words, *([f"--config={stored}", "--resume=null"] if stored else [])]
    config = parse(Config, words, prog="tools.analyze", registries=REGISTRIES).config
    if options.profile is not None:
        if options.profile < 1:
            raise UserError(f"--profile {options.profile}: must be at least 1 step")
        return profile(config, words, options.profile)
    if options.repeat < 2:
        raise UserError(f"--repeat {options.repeat}: must be at least 2")
    sizes = (options.batch or str(config.batch_size)).split(",")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(f"--batch {options.batch}: must be whole numbers above 0, such as 1,32")
    usual = next(name for name, mode in DTYPES.items() if mode == config.precision.mode)
    dtypes = (options.dtype or usual).split(",")
    if unknown := [name for name in dtypes if name not in DTYPES]:
        raise UserError(f"--dtype {unknown[0]}: is not a format; there are {', '.join(DTYPES)}")
    result = analyze(config, [int(size) for size in sizes], dtypes, options)
    report(result)
    if options.json:
        write_text(options.json, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    with reported(), explained():
        leave(main(sys.argv[1:]))
