"""From a built model to one that is trained."""

from loguru import logger
from torch import nn

from common.base.errors import UserError
from common.distributed import DistConfig, Rank
from common.model.blocks import checkpoint_activations, compile_modules
from common.model.config import PrepareConfig
from common.model.freeze import KEY as FREEZE
from common.model.freeze import freeze, parameter_names
from common.model.names import matched, matched_modules
from common.model.strategy import Alone, Replicated, Strategy
from common.optim.precision import Precision

_BLOCKS, _RECOMPUTED, _COMPILED = "prepare.fsdp.blocks", "prepare.activation_checkpointing", "prepare.compile.blocks"


def prepare(model: nn.Module, config: PrepareConfig, dist: DistConfig, precision: Precision, rank: Rank) -> Strategy:
    """Make a model, built and with its first weights, ready for training: all that happens to it, in order.

    The optimizer, the average and whatever else keeps parameters come after this: FSDP replaces them.

    Raises:
        UserError: a pattern matches nothing, or the model does not go with what is asked for.
    """
    model = precision.cast(model)
    if dist.sync_bn and not rank.is_alone:
        if rank.device.type != "cuda":
            raise UserError("dist.sync_bn: PyTorch synchronises batch norm on CUDA only")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    freeze(model, config.freeze)  # before the wrapping: DDP waits for a gradient of every parameter that can have one
    recomputed = matched_modules(model, config.activation_checkpointing, _RECOMPUTED)
    checkpoint_activations(recomputed.values())
    if config.compile.enabled:
        compiled = _to_compile(model, config, config.fsdp.blocks if is_sharding(dist, rank) else [])
        compile_modules(compiled.values(), config.compile)  # with the recomputing inside it, which it plans along
        logger.info("compiled at the first step: {}", ", ".join(compiled) or type(model).__name__)
    strategy = _strategy(model, config, dist, precision, rank)
    strategy.about += ", compiled" if config.compile.enabled else ""
    return strategy


def is_sharding(dist: DistConfig, rank: Rank) -> bool:
    """Whether the weights are sharded. A single process keeps them all, whatever the config says."""
    return dist.strategy == "fsdp" and not rank.is_alone


def check_patterns(model: nn.Module, config: PrepareConfig) -> None:
    """Raise `UserError` for a pattern that matches nothing, before anything is changed."""
    matched(config.freeze, parameter_names(model), FREEZE)
    for patterns, key in (
        (config.activation_checkpointing, _RECOMPUTED),
        (config.compile.blocks, _COMPILED),
        (config.fsdp.blocks, _BLOCKS),
    ):
        matched_modules(model, patterns, key)


def _to_compile(model: nn.Module, config: PrepareConfig, sharded: list[str]) -> dict[str, nn.Module]:
    for patterns, key in (
        (config.compile.blocks, _COMPILED),
        (sharded, _BLOCKS),  # the gathering of weights cannot be compiled, so code goes from one to the next
        (config.activation_checkpointing, _RECOMPUTED),
    ):
        if patterns:
            return matched_modules(model, patterns, key)
    return {"": model}


def _strategy(model: nn.Module, config: PrepareConfig, dist: DistConfig, precision: Precision, rank: Rank) -> Strategy:
    if is_sharding(dist, rank):
        from common.model.fsdp import Sharded  # 0.8 s, and most runs do without

        blocks = list(matched_modules(model, config.fsdp.blocks, _BLOCKS).values())
        return Sharded(model, blocks, precision, config.fsdp, broadcast=dist.broadcast_buffers, rank=rank)
    if dist.strategy == "fsdp":
        logger.info("dist.strategy fsdp has no effect on a single process")
    model = model.to(rank.device)
    return Alone(model, precision) if rank.is_alone else Replicated(model, precision, dist, rank)
