"""Statistics of weights and gradients at every log line."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from loguru import logger
from torch import nn

from common.distributed.collectives import local
from common.monitor.meter import Timing
from common.progress import Position
from common.run_context import RunContext
from common.trainer import Trainer


@contextmanager
def around(run: RunContext, trainer: Trainer) -> Iterator[None]:
    """Log gradients with every log line, if debug.debug_mode is on."""
    config = trainer.config.debug

    def log(at: Position, timing: Timing) -> None:
        log_gradients(trainer.task, every=config.print_all_grad)  # type: ignore[attr-defined]  # which this part adds

    if config.debug_mode:
        trainer.monitor.after_log.append(log)
    yield


@torch.no_grad()
def log_gradients(model: nn.Module, *, every: bool) -> None:
    """Log the largest gradient of this process' last step and, with `every`, each parameter's mean weight and gradient.

    Of sharded weights, only this process' part. Waits for the device: not for normal runs.
    """
    rows = []
    largest = -1.0
    where = "nothing"
    for name, parameter in model.named_parameters():
        gradient = torch.empty(0)
        if parameter.grad is not None:
            gradient = local(parameter.grad)
        if gradient.is_sparse:  # of an embedding: the rows that were used
            gradient = gradient.coalesce().values()
        if gradient.numel() == 0:
            rows.append(f"  {name}: no gradient here")
            continue
        sizes = gradient.abs()
        rows.append(f"  {name}: mean weight {local(parameter).mean():.3e}, mean |gradient| {sizes.mean():.3e}")
        size = float(sizes.max())
        if not size <= largest:  # also true for NaN
            largest = size
            where = name
    logger.info("largest |gradient| {:.3e} in {}", largest, where)
    if every:
        logger.info("weights and gradients:\n{}", "\n".join(rows))
