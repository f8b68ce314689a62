"""Show the learning rate that a config plans: python -m tools.rates --config FILE [--out rates.html] [--key value ...]

Nothing is trained. The training data are opened, since lengths in epochs depend on their number.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import nn

from common.base.errors import UserError
from common.base.files import write_text
from common.config.problem import place
from common.config.registry import REGISTRIES
from common.data.order import EpochOrder
from common.data.plan import EpochPlan
from common.data.sections import build_dataset
from common.data.view import is_map_style
from common.failure.program import leave, reported
from common.monitor.log import setup_log
from common.optim import build_optimizer
from common.optim.groups import LayerDecayConfig
from common.progress import Position, total_steps
from common.run.paths import PROJECT, data_dir
from common.stages import Stages
from cli.command_line import parse
from support.report.charts import Curve, chart
from support.report.page import page, table, tag
from custom.config import Config

_ROWS, _BAR = 16, 40  # lines of the table, characters of its longest bar


def planned(config: Config) -> Iterator[tuple[int, int | None, float, float | None]]:
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
    stages, optimizer = Stages(config, total, per_epoch), None
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


def main(argv: list[str]) -> int:
    """Read the command line, print a table, and write a picture if `--out` names a file. Returns the exit code."""
    setup_log("WARNING")
    parser = argparse.ArgumentParser("python -m tools.rates", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path)
    options, words = parser.parse_known_args(argv)
    config = parse(Config, words, prog="python -m tools.rates", description=__doc__, registries=REGISTRIES).config
    points = list(planned(config))
    highest, last, count = max(rate for _, _, rate, _ in points), len(points) - 1, min(_ROWS, len(points))
    head = ["step", "epoch", "lr", *["momentum"] * (points[0][3] is not None)]
    chosen = [points[number * last // max(count - 1, 1)] for number in range(count)]
    rows = [
        [str(step), "-" if epoch is None else str(epoch + 1), *(f"{each:.3g}" for each in values if each is not None)]
        for step, epoch, *values in chosen
    ]
    for row, bar in zip([head, *rows], [0.0, *(point[2] for point in chosen)], strict=True):
        print("  ".join(f"{cell:>9}" for cell in row), "#" * round(_BAR * bar / highest))
    if options.out:
        curves = [("learning rate", [(p[0], p[2]) for p in points])]
        curves += [("momentum", [(p[0], p[3]) for p in points if p[3] is not None])]
        charts = [chart(name, [Curve(name, each)], log=False) for name, each in curves]
        title = f"Planned rates of {config.name}"
        write_text(options.out, page(title, tag("h1", title), *charts, table(head, rows)))
        print(f"the picture is {place(options.out)}")
    return 0


if __name__ == "__main__":
    with reported():
        leave(main(sys.argv[1:]))
