"""Show the learning rate that a config plans: python -m tools.rates --config FILE [--key value ...]

Nothing is trained. The training data are opened, since lengths in epochs depend on their number.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from common.base.errors import UserError
from common.data.order import EpochOrder
from common.data.plan import EpochPlan
from common.data.sections import build_dataset
from common.data.view import is_map_style
from common.monitor.log import setup_log
from common.optim import build_optimizer
from common.optim.groups import LayerDecayConfig
from common.progress import Position, total_steps
from common.run.paths import PROJECT, data_dir
from common.stage import WholeRun
from common.stages import Stages
from cli.program import run
from cli.stored_config import train_config
from custom.config import Config

_ROWS, _BAR = 16, 40  # lines of the table, characters of its longest bar


def plan_rates(config: Config) -> Iterator[tuple[int, int | None, float, float | None]]:
    """For each optimizer step of a run: the step, its epoch, the rate, and the momentum if that changes too.

    Rates of groups are multiples of it. What depends on validation (plateau) is shown as if nothing came of it.
    """
    processes = config.dist.processes or (len(config.gpu_ids) if isinstance(config.gpu_ids, list) else 1)
    size = config.batch_size * config.optim.accumulate * (1 if config.dist.reduction == "fixed" else processes)
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
            optimizer = build_optimizer(optim.scale_lr(size), nn.Linear(1, 1, bias=False))
            schedule = stages.schedule(optimizer)
        schedule.step(step - stages.start)
        group = optimizer.param_groups[0]
        momentum = None if schedule.momentum is None else schedule.momentum.value(group)
        yield step, epoch, group["lr"], momentum


def main(argv: list[str]) -> int:
    """Read the command line, and print a table with bars. Returns the exit code."""
    setup_log("WARNING")
    config = train_config(argv, prog="python -m tools.rates", description=__doc__).config
    points = list(plan_rates(config))
    highest, last, count = max(rate for _, _, rate, _ in points), len(points) - 1, min(_ROWS, len(points))
    print("     step      epoch         lr" + "   momentum" * (points[0][3] is not None))
    for number in range(count):
        step, epoch, rate, momentum = points[number * last // max(count - 1, 1)]
        cells = [str(step), "-" if epoch is None else str(epoch + 1), f"{rate:.3g}"]
        cells += [] if momentum is None else [f"{momentum:.3g}"]
        print("  ".join(f"{cell:>9}" for cell in cells) + " " + "#" * round(_BAR * rate / highest))
    return 0


if __name__ == "__main__":
    run(main)
