"""Look for probable mistakes before the first step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from loguru import logger
from torch.nn.modules.batchnorm import _BatchNorm

from common.base.text import label
from common.config.arguments import parameter_names
from common.config.registry import SCHEDULE_REGISTRY
from common.data.loader import BatchReader
from common.data.order import EpochPlan
from common.optim.groups import learning_rates
from common.progress import Position
from common.run_context import RunContext
from common.task import Task
from common.trainer import Trainer
from parts.checks.class_counts import log_classes
from parts.checks.first_batch import FirstBatch
from parts.checks.shared_samples import warn_of_shared_samples


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Warn of what is found, in the main process."""
    if run.rank.is_main:
        loaders: dict[str, BatchReader] = {"train": trainer.stream}
        for loader in (*trainer.val, *trainer.evaluation):
            loaders[label(loader.split, loader.name)] = loader
        for name, each in loaders.items():
            log_classes(name, each.dataset)
        warn_of_shared_samples(loaders, trainer.state.fingerprint["data"])
        if trainer.stream.is_indexed:
            warn_of_single_samples(trainer.task, trainer.stream.plan)
        trainer.evaluator.after_sanity_check.append(FirstBatch(trainer))
    warn_of_other_rates(trainer)
    yield


def warn_of_other_rates(trainer: Trainer) -> None:
    """Warn in a resume if a schedule over the whole run gives the last step another learning rate than it had."""
    begun = trainer.at.step - trainer.stage.start
    config = trainer.stage.config.optim.lr_scheduler
    kind = SCHEDULE_REGISTRY.get(config.type)
    follows_length = config.tmax is None and "steps" in parameter_names(kind)
    if begun < 1 or not follows_length or hasattr(kind, "after_validation"):
        return
    before = learning_rates(trainer.optimizer)
    trainer.schedule.step(begun - 1)  # as before each step
    now = learning_rates(trainer.optimizer)
    if now != before and trainer.rank.is_main:
        name = next(name for name in now if now[name] != before[name])
        logger.warning(
            "step {} had the learning rate {:.3g}, and this config gives it {:.3g}: unless your code sets the rates, "
            "they are not those of a run that was never cut. If only the length differs, this keeps the old schedule: "
            "--optim.lr_scheduler.tmax OLD_LENGTH --allow_changes true",
            *(trainer.at.step, before[name], now[name]),
        )


def warn_of_single_samples(task: Task, plan: EpochPlan) -> None:
    """Warn if an epoch's last micro-batch has one sample, of which batch norm cannot compute a variance."""
    if plan.batch_size == 1 or not any(isinstance(module, _BatchNorm) for module in task.modules()):
        return  # an item may be a batch
    start = Position(sample=(plan.steps_per_epoch - 1) * plan.samples_per_step)
    order = np.arange(plan.size)
    last = [next(replace(plan, rank=rank).global_batches(order, start)) for rank in range(plan.world_size)]
    if any(share.sizes[-1] == 1 for share in last):
        logger.warning(
            "the last step of each epoch has a micro-batch of 1 sample ({} samples, {} in a step): batch norm takes "
            "its statistics from that sample alone, or refuses it: --loader.drop_last true, or another --batch_size",
            *(plan.size, plan.samples_per_step),
        )
