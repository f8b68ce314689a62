"""Look for probable mistakes before the first step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from loguru import logger
from torch.nn.modules.batchnorm import _BatchNorm

from common.base.text import label
from common.data.loader import Reader
from common.data.order import EpochPlan
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
        loaders: dict[str, Reader] = {"train": trainer.stream}
        for loader in (*trainer.val, *trainer.evaluation):
            loaders[label(loader.split, loader.name)] = loader
        for name, each in loaders.items():
            log_classes(name, each.dataset)
        warn_of_shared_samples(loaders, trainer.state.fingerprint["data"])
        if trainer.stream.is_indexed:
            warn_of_single_samples(trainer.task, trainer.stream.plan)
        trainer.evaluator.after_sanity_check.append(FirstBatch(trainer))
    yield


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
