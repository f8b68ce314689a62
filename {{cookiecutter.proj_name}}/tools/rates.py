"""Show the learning rate that a config plans: python -m tools.rates --config FILE [--out rates.html] [--key value ...]

Nothing is trained. The training data are opened, since lengths in epochs depend on their number.
"""

import argparse
import html
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from common.base.errors import UserError
from common.base.files import output_file, write_text
from common.config.problem import place
from common.config.registry import REGISTRIES
from common.data.order import EpochOrder
from common.data.plan import EpochPlan
from common.data.sections import build_dataset
from common.data.view import is_map_style
from common.failure.program import exit_process, report_errors
from common.monitor.log import setup_log
from common.optim import build_optimizer
from common.optim.groups import LayerDecayConfig
from common.progress import Position, total_steps
from common.run.paths import PROJECT, data_dir
from common.stage import WholeRun
from common.stages import Stages
from cli.command_line import parse
from custom.config import Config

_ROWS, _BAR = 16, 40  # lines of the table, characters of its longest bar


def plan_rates(config: Config) -> Iterator[tuple[int, int | None, float, float | None]]:
    """For each optimizer step of a run: the step, its epoch, the rate, and the momentum if that changes too.

    Rates of groups are multiples of it. What depends on validation (plateau) is shown as if nothing came of it.
    """
    processes = config.dist.processes or (len(config.gpu_ids) if isinstance(config.gpu_ids, list) else 1)
    size = config.batch_size * config.optim.accumulate * processes
    folder, limit, per_epoch = data_dir(config.dir, PROJECT), config.debug.max_samples, None
    dataset = build_dataset(config.dataset.train, "train", folder, limit=limit)
    if is_map_style(dataset):
        order = EpochOrder(config.loader.order, dataset, 0)
        per_epoch = EpochPlan(order, batch_size=size, drop_last=config.loader.drop_last).steps_per_epoch
    if (total := total_steps(config.progress, per_epoch)) is None:
        raise UserError("the data have no length, so the run has none; set progress.max_steps")
    stages, optimizer = (Stages if config.stages else WholeRun)(config, total, per_epoch), None
    for step in range(total):
        epoch = step // per_epoch if per_epoch else None
        if stages.advance(Position(step, epoch or 0)) or optimizer is None:
            optim = replace(stages.config.optim, groups=[], layer_decay=LayerDecayConfig(), no_decay=[])
            optimizer = build_optimizer(optim.scaled(size), nn.Linear(1, 1, bias=False))
            schedule = stages.schedule(optimizer)
        schedule.step(step - stages.start)
        group = optimizer.param_groups[0]
        momentum = None if schedule.momentum is None else schedule.momentum.value(group)
        yield step, epoch, group["lr"], momentum


def picture(name: str, points: Sequence[tuple[int, float]], dots: Sequence[int]) -> str:
    """A curve as SVG, with the ends of its axes, and dots at some steps that show their value."""
    low, high, last = min(value for _, value in points), max(value for _, value in points), points[-1][0]
    spots = [(step, value, 60 + 480 * step / (last or 1), 180 - 160 * (value - low) / (high - low or 1))
             for step, value in points]  # fmt: skip
    line = " ".join(f"{x:.1f},{y:.1f}" for *_, x, y in spots[:: max(1, len(spots) // 1000)])
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{name} {value:.6g} at step {step}</title></circle>'
             for step, value, x, y in spots if step in dots]  # fmt: skip
    texts = {(50, 24): f"{high:.3g}", (50, 184): f"{low:.3g}", (60, 198): "0", (540, 198): f"step {last}"}
    parts += [f'<text x="{x}" y="{y}" text-anchor="end" font-size="11">{text}</text>' for (x, y), text in texts.items()]
    curve = f'<polyline points="{line}" fill="none" stroke="#2563c9"/>'
    return f'<h2>{name}</h2><svg viewBox="0 0 560 204" width="840">{curve}{"".join(parts)}</svg>'


def main(argv: list[str]) -> int:
    """Read the command line, print a table, and write a picture if `--out` names a file. Returns the exit code."""
    setup_log("WARNING")
    parser = argparse.ArgumentParser("python -m tools.rates", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path)
    options, words = parser.parse_known_args(argv)
    config = parse(Config, words, prog="python -m tools.rates", description=__doc__, registries=REGISTRIES).config
    points = list(plan_rates(config))
    highest, last, count = max(rate for _, _, rate, _ in points), len(points) - 1, min(_ROWS, len(points))
    lines = ["     step      epoch         lr" + "   momentum" * (points[0][3] is not None)]
    chosen = [points[number * last // max(count - 1, 1)] for number in range(count)]
    for step, epoch, rate, momentum in chosen:
        cells = [str(step), "-" if epoch is None else str(epoch + 1), f"{rate:.3g}"]
        cells += [] if momentum is None else [f"{momentum:.3g}"]
        lines.append("  ".join(f"{cell:>9}" for cell in cells) + " " + "#" * round(_BAR * rate / highest))
    table = "\n".join(lines)
    print(table)
    if options.out:
        curves = {"learning rate": [(step, rate) for step, _, rate, _ in points]}
        curves["momentum"] = [(step, momentum) for step, _, _, momentum in points if momentum is not None]
        drawn = [picture(name, each, [step for step, *_ in chosen]) for name, each in curves.items() if each]
        title = html.escape(f"Planned rates of {config.name}")
        head = f'<!doctype html><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>'
        with output_file(options.out):
            write_text(options.out, "\n".join([head, *drawn, f"<pre>{table}</pre>\n"]))
        print(f"the picture is {place(options.out)}")
    return 0


if __name__ == "__main__":
    with report_errors():
        exit_process(main(sys.argv[1:]))
