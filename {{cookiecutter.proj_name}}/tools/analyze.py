"""What a model costs, on a batch of the config's own training data: python -m tools.analyze --config FILE

Parameters and floating point operations of each module; operations, time and memory of each batch size.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from common.base.errors import UserError, error_context
from common.base.files import write_text
from common.build import build_stream, build_task
from common.distributed import has_streams
from common.distributed.devices import set_up_process
from common.model import prepare
from common.monitor.log import setup_log
from common.optim.precision import build_precision
from common.stage import in_stage
from common.task import TaskPosition
from cli.command_line import parse
from cli.program import run, with_config_of_run
from cli.trained import find_device
from parts.speed.flops import count_flops
from custom.config import Config


class ProfiledTask:
    """A task, a batch of its training data and what they cost.

    Args:
        size: samples of the batch; `UserError` if there are fewer.
    """

    def __init__(self, config: Config, size: int) -> None:
        first, dist = in_stage(config, 0), replace(config.dist, processes=None)
        rank = find_device(config.gpu_ids)
        set_up_process(dist, rank)
        stream = build_stream(replace(config, batch_size=size), rank)
        if 0 < stream.epoch_size < size:
            raise UserError(f"--batch {size}: the training data has only {stream.epoch_size} samples")
        batch = stream.sample_batch(full=True)
        stream.close()
        self.precision, self.device, self.size = build_precision(config.precision, rank.device), rank.device, size
        self.task = build_task(config, rank, first_weights=False)
        # Compiled kernels cannot be assigned to modules.
        eager = replace(first.prepare, compile=replace(first.prepare.compile, enabled=False))
        prepare(self.task, eager, dist, self.precision, rank)
        self.task.at = TaskPosition(0, 0, None, stream.steps_per_epoch)
        self.task.loss.set_weights(first.loss)
        self.batch = self.task.prepare_batch(self.precision.cast_batch(batch), rank.device)

    def forward(self) -> None:
        """Run a forward pass, as in evaluation."""
        self.task.eval()
        with torch.no_grad(), self.precision.autocast():
            self.task(self.task.output, self.batch)

    def train(self) -> None:
        """Forward and backward pass of every update of a step."""
        self.task.train()
        for name in self.task.updates():
            with self.precision.autocast():
                losses = self.task(self.task.update, name, self.batch)
            if "loss" not in losses:
                raise UserError(f"{type(self.task).__name__} has no `loss` in update {name}; see section loss")
            losses["loss"].backward()
        self.task.zero_grad()

    def costs(self) -> dict[str, Any]:
        """Measure the batch; times, in seconds, as median and interquartile range."""
        result: dict[str, Any] = {"batch": self.size, "bytes_peak": None}
        for name, call in (("forward", self.forward), ("train", self.train)):
            timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
            times = timer.blocked_autorange()  # after a warm-up; the device is waited for
            result |= {f"flops_{name}": count_flops(call)["Global"], f"seconds_{name}": [times.median, times.iqr]}
        if has_streams(self.device):
            torch.accelerator.reset_peak_memory_stats(self.device)
            self.train()
            result["bytes_peak"] = torch.accelerator.max_memory_allocated(self.device)
        return result

    def modules(self, depth: int) -> list[dict[str, Any]]:
        """Parameters and operations of each module that has any, down to `depth` levels below the model."""
        rows, forward, train = [], count_flops(self.forward), count_flops(self.train)
        for name, module in nn.Module.named_modules(self.task):
            short, key = name.removeprefix("model."), f"{type(self.task).__name__}.{name}" if name else "Global"
            level = 0 if short in ("", "model") else short.count(".") + 1
            row = {"module": short or "task", "type": type(module).__name__}
            row |= {"parameters": sum(tensor.numel() for tensor in module.parameters())}
            row |= {"trained": sum(item.numel() for item in module.parameters() if item.requires_grad)}
            if level <= depth and (row["parameters"] or forward[key]):
                rows.append({**row, "flops_forward": forward[key], "flops_train": train[key]})
        return rows


def analyze(config: Config, sizes: Sequence[int], depth: int) -> dict[str, Any]:
    """Return what a batch of each size costs, and for the first of them what each module computes."""
    subjects = (ProfiledTask(config, size) for size in sizes)
    batches, modules = [], list[dict[str, Any]]()
    for subject in subjects:
        with error_context(f"in analyzing a batch of {subject.size}"):
            modules = modules or subject.modules(depth)
            batches.append(subject.costs())
    about = {"task": config.task["type"], "model": config.model["type"], "precision": config.precision.mode}
    about |= {"device": str(subject.device), "threads": torch.get_num_threads(), "torch": str(torch.__version__)}
    return {**about, "batches": batches, "modules": modules}


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows in columns; those of text are aligned to the left."""
    texts = [{name: in_words(name, value) for name, value in row.items()} for row in rows]
    columns = {name: [name.replace("_", " "), *(row[name] for row in texts)] for name in rows[0]}
    for name, cells in columns.items():
        side, width = "<" if isinstance(rows[0][name], str) else ">", max(map(len, cells))
        columns[name] = [f"{cell:{side}{width}}" for cell in cells]
    for row in zip(*columns.values(), strict=True):
        print("  " + "  ".join(row).rstrip())


def in_words(name: str, value: Any) -> str:
    """Format a value of a table: 1.23 M of operations or bytes; of a time in seconds, the median and the range."""
    if isinstance(value, list):
        return f"{1e3 * value[0]:.2f} ± {1e3 * value[1] / 2:.2f} ms"
    if not name.startswith(("flops", "bytes")) or value is None:
        return f"{value:,}" if isinstance(value, int) else str(value or "-")
    power = next(power for power in range(6) if value < 999.5 * 1000**power)
    return f"{value / 1000**power:.3g} {' kMGTP'[power]}".rstrip()


def main(argv: list[str]) -> int:
    """Read the command line, measure, print. Returns the exit code."""
    setup_log("WARNING")
    parser = argparse.ArgumentParser(
        prog="python -m tools.analyze", description=__doc__.splitlines()[0], allow_abbrev=False,
        epilog="All other options are settings of train.py.",
    )  # fmt: skip
    parser.add_argument("--batch", help="batch sizes: 1,32; default: the config's batch_size")
    parser.add_argument("--depth", type=int, default=2, help="levels of modules below the model; default 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options, words = parser.parse_known_args(argv)
    config = parse(Config, with_config_of_run(words), prog="tools.analyze").config
    sizes = (options.batch or str(config.batch_size)).split(",")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(f"--batch {options.batch}: must be integers above 0, such as 1,32")
    result = analyze(config, [int(size) for size in sizes], options.depth)
    print("{task} with {model} in {precision} on {device} with {threads} threads, torch {torch}\n".format(**result))
    print_table(result["modules"])
    print("\nbatches; times are the median ± half the interquartile range")
    print_table(result["batches"])
    if options.json:
        write_text(options.json, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run(main)
