"""Statistics of weights and gradients, for `debug.debug_mode`."""

from typing import Annotated

import torch
from loguru import logger
from pydantic import Field
from torch import nn

from common.config import section
from common.distributed.sharded import local


@section
class DebugConfig:
    """Debugging aids. `--debug` sets these and more, see configs/debug.yaml."""

    debug_mode: Annotated[bool, Field(description="anomaly detection, and gradients at every log line")] = False
    print_all_grad: Annotated[bool, Field(description="with debug_mode: weights and gradients by parameter")] = False
    max_samples: Annotated[int, Field(ge=0, description="use only the first n samples of each split; 0: all")] = 0


@torch.no_grad()
def log_gradients(model: nn.Module, *, every: bool) -> None:
    """Log the largest gradient of this process' last step and, with `every`, each parameter's mean weight and gradient.

    Of sharded weights, only this process' part. Waits for the device: not for normal runs.
    """
    rows = []
    largest = -1.0
    where = "nothing"
    for name, parameter in model.named_parameters():
        if parameter.grad is None or local(parameter).numel() == 0:
            rows.append(f"  {name}: {'no gradient here' if parameter.requires_grad else 'frozen'}")
            continue
        sizes = local(parameter.grad).abs()
        rows.append(f"  {name}: mean weight {local(parameter).mean():.3e}, mean |gradient| {sizes.mean():.3e}")
        size = float(sizes.max())
        if not size <= largest:  # also true for NaN
            largest = size
            where = name
    logger.info("largest |gradient| {:.3e} in {}", largest, where)
    if every:
        logger.info("weights and gradients:\n{}", "\n".join(rows))
