"""Prepares a built task for training."""

from collections.abc import Sequence

import torch
from loguru import logger
from torch import nn

from common.base.errors import UserError
from common.base.parts import required
from common.config.names import match_names
from common.distributed import DistConfig, Rank
from common.model.blocks import recompute_in_backward
from common.model.config import PrepareConfig
from common.model.freeze import freeze, parameter_names
from common.model.strategy import ModelHolder, Replicated, Strategy
from common.optim.precision import Precision


def prepare(
    task: ModelHolder,
    config: PrepareConfig,
    dist: DistConfig,
    precision: Precision,
    rank: Rank,
) -> Strategy:
    """Prepare a task with an initialized model for training: all steps, in order.

    Create the optimizer, the average and all else that holds parameters after this: a strategy may replace them.

    Raises:
        UserError: a pattern matches nothing, or the model does not fit the config.
    """
    is_sharded = dist.is_sharded and not rank.is_single_process
    precision.cast(task)
    if dist.sync_bn and not rank.is_single_process:
        task.model = nn.SyncBatchNorm.convert_sync_batchnorm(task.model)
    if config.channels_last:
        # A convolution with such a weight also gives its input and output this order.
        task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # absent from the stubs
    unfreeze = freeze(task, config.freeze)  # before DDP, which waits for a gradient of all that can have one
    recomputed, compiled, blocks = check_patterns(task, config)
    for module in recomputed.values():
        recompute_in_backward(module)
    if config.compile.enabled:
        # Gathering weights block by block cannot be compiled, so each block is compiled on its own.
        compiled = compiled or (is_sharded and blocks) or recomputed or {"": task.model}
        options = {
            "backend": config.compile.backend,
            "dynamic": config.compile.dynamic,
            "fullgraph": config.compile.fullgraph,
        }
        if config.compile.backend == "inductor":  # torch refuses a mode for other backends
            options["mode"] = config.compile.mode
        for module in compiled.values():  # with recomputation, which the compiler plans too
            module.compile(**options)
        logger.info("compiled at the first step: {}", ", ".join(compiled) or type(task.model).__name__)
    strategy: Strategy
    if is_sharded:
        sharding = required("fsdp", "strategy", "dist.strategy: fsdp")  # here: the import takes 0.8 s
        strategy = sharding.Sharded(task, blocks.values(), precision, config, dist, rank)
    elif rank.is_single_process or dist.is_fixed:  # which reduces gradients itself
        strategy = Strategy(task.to(rank.device), precision)
    else:
        strategy = Replicated(task.to(rank.device), precision, dist)
    strategy.frozen = config.freeze, unfreeze
    if config.channels_last:
        strategy.about += ", channels last"
    if config.compile.enabled:
        strategy.about += ", compiled"
        strategy.copy_gradients = config.compile.mode in ("reduce-overhead", "max-autotune")
    return strategy


Modules = dict[str, nn.Module]


def check_patterns(task: nn.Module, config: PrepareConfig) -> tuple[Modules, ...]:
    """Return the modules to recompute, to compile and to gather, by name.

    Raises `UserError` for a pattern without a match.
    """
    match_names(config.freeze, parameter_names(task), "prepare.freeze")
    return (
        _match_modules(task, config.activation_checkpointing, "prepare.activation_checkpointing"),
        _match_modules(task, config.compile.blocks, "prepare.compile.blocks"),
        _match_modules(task, config.gathered, "prepare.fsdp.blocks"),
    )


def _match_modules(task: nn.Module, patterns: Sequence[str], key: str) -> Modules:
    """Return the modules below a task's model that any of `patterns` matches, except those inside another match.

    Raises:
        UserError: a pattern matches nothing, or a list of modules, which is never called itself.
    """
    modules = {name: module for name, module in task.named_modules() if name}  # task and model have the name ""
    chosen: Modules = {}
    for name in match_names(patterns, list(modules), key):
        if any(name.startswith(f"{above}.") for above in chosen):
            continue
        module = modules[name]
        if type(module).forward is nn.Module.forward:
            kind = type(module).__name__
            raise UserError(f"{key}: {name} is a {kind}, which is never called; name what is in it: {name}.*")
        chosen[name] = module
    return chosen
