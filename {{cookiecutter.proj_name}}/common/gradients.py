"""A look at weights and gradients, for `debug.debug_mode`."""

import torch
from loguru import logger
from torch import nn


def log_gradients(model: nn.Module, *, every: bool) -> None:
    """Log the largest gradient of this process' last step and, with `every`, each parameter's mean weight and gradient.

    Waits for the device: not for normal runs.
    """
    rows = []
    largest, where = -1.0, "nothing"
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            rows.append(f"  {name}: no gradient" if parameter.requires_grad else f"  {name}: frozen")
            continue
        with torch.no_grad():
            top = float(parameter.grad.abs().max())
            rows.append(f"  {name}: mean weight {parameter.mean():.3e}, mean |gradient| {parameter.grad.abs().mean():.3e}")
        if not top <= largest:  # also true for a gradient that is not a number
            largest, where = top, name
    logger.info("largest |gradient| {:.3e} in {}", largest, where)
    if every:
        logger.info("weights and gradients:\n{}", "\n".join(rows))
