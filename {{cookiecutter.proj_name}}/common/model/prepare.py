"""Prepares a built task for training."""

import torch
from loguru import logger
from torch import nn

from common.base.errors import UserError
from common.config.names import matched
from common.distributed import DistConfig, Rank
from common.model.blocks import checkpoint_activations, compile_modules
from common.model.config import PrepareConfig
from common.model.freeze import freeze, parameter_names
from common.model.names import ModelHolder, matched_modules
from common.model.strategy import Replicated, Strategy
from common.optim.precision import Precision


def prepare(task: ModelHolder, config: PrepareConfig, dist: DistConfig, precision: Precision, rank: Rank) -> Strategy:
    """Prepare a task whose model has its first weights for training: all steps, in order.

    Create the optimizer, the average and all else that holds parameters after this: FSDP replaces them.

    Raises:
        UserError: a pattern matches nothing, or the model does not fit the config.
    """
    is_sharded = dist.strategy == "fsdp" and not rank.is_single_process
    precision.cast(task)
    if dist.sync_bn and not rank.is_single_process:
        task.model = nn.SyncBatchNorm.convert_sync_batchnorm(task.model)
    if config.channels_last and is_sharded:
        raise UserError("prepare.channels_last: dist.strategy fsdp needs contiguous weights; turn it off, or use ddp")
    if config.channels_last:
        # A convolution with such a weight also gives its input and output this order.
        task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # absent from the stubs
    thaw = freeze(task, config.freeze)  # before wrapping: DDP waits for a gradient of every parameter that can have one
    recomputed, compiled, blocks = check_patterns(task, config)
    checkpoint_activations(recomputed.values())
    if config.compile.enabled:
        # Gathering weights block by block cannot be compiled, so each block is compiled on its own.
        compiled = compiled or (is_sharded and blocks) or recomputed or {"": task.model}
        compile_modules(compiled.values(), config.compile)  # with recomputation, which the compiler plans too
        logger.info("compiled at the first step: {}", ", ".join(compiled) or type(task.model).__name__)
    strategy: Strategy
    if is_sharded:
        from common.model.fsdp import Sharded  # the import takes 0.8 s, and most runs do not need it

        strategy = Sharded(task, blocks.values(), precision, config.fsdp, broadcast=dist.broadcast_buffers, rank=rank)
    elif rank.is_single_process:
        if dist.strategy == "fsdp":
            logger.info("dist.strategy fsdp has no effect on a single process")
        strategy = Strategy(task.to(rank.device), precision)
    else:
        strategy = Replicated(task.to(rank.device), precision, dist)
    strategy.frozen = config.freeze, thaw
    strategy.about += ", channels last" if config.channels_last else ""
    strategy.about += ", compiled" if config.compile.enabled else ""
    return strategy


def check_patterns(task: nn.Module, config: PrepareConfig) -> tuple[dict[str, nn.Module], ...]:
    """The modules to recompute, to compile and to gather, by name. Raises `UserError` for a pattern without a match."""
    matched(config.freeze, parameter_names(task), "prepare.freeze")
    return (
        matched_modules(task, config.activation_checkpointing, "prepare.activation_checkpointing"),
        matched_modules(task, config.compile.blocks, "prepare.compile.blocks"),
        matched_modules(task, config.fsdp.blocks, "prepare.fsdp.blocks"),
    )
