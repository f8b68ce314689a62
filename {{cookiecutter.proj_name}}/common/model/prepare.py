"""Prepares a built task for training, on a single process or on replicas that average their gradients (DDP)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.base.errors import UserError
from common.config.names import matched
from common.distributed import DistConfig, Rank, buffer_kinds
from common.model.blocks import recompute_in_backward
from common.model.config import PrepareConfig
from common.model.freeze import freeze, parameter_names
from common.model.names import ModelHolder
from common.optim.precision import Precision

_NOTHING = nullcontext()


class Strategy:
    """A prepared task, and how processes train it. This class: a single process.

    Attributes:
        about: how it was prepared, in a few words for the log and the checkpoint.
        task: without wrappers, so names have no prefix.
        precision: number format of the forward pass.
        frozen: the patterns of frozen parameters, and a function that unfreezes these.
        lockstep_forward: whether each forward pass needs all processes, so that all must make the same number of them.
    """

    lockstep_forward = False

    def __init__(self, task: nn.Module, precision: Precision, about: str = "whole") -> None:
        self.about = about
        self.task = task
        self.precision = precision
        self.frozen: tuple[Sequence[str], Callable[[], None]] = [], lambda: None

    def freeze(self, patterns: Sequence[str]) -> None:
        """Freeze the parameters that any of `patterns` matches, and no longer those that were frozen so far."""
        before, unfreeze = self.frozen
        if patterns != before:
            unfreeze()
            self.frozen = patterns, freeze(self.task, patterns)

    def wrap(self, trained: Sequence[nn.Parameter]) -> nn.Module:
        """What an update that trains these parameters calls: the task or a wrapper. Every process must call this."""
        return self.task

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """A context in which backward passes of a wrapped task average gradients over processes only if `enabled`."""
        return _NOTHING

    def shard_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state of a checkpoint, with its tensors as this strategy holds them."""
        return state


class Replicated(Strategy):
    """Every process holds the whole task; gradients are averaged during the backward pass (DDP)."""

    def __init__(self, task: nn.Module, precision: Precision, config: DistConfig) -> None:
        super().__init__(task, precision)
        self._config = config

    def wrap(self, trained: Sequence[nn.Parameter]) -> nn.Module:
        config, chosen = self._config, set(trained)
        others = [name for name, parameter in self.task.named_parameters() if parameter not in chosen]
        # DDP writes the name of a parameter of the task itself with a dot in front.
        ignored = [*others, *(f".{name}" for name in others if "." not in name), *buffer_kinds(self.task)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.task, ignored)
        wrapped = DistributedDataParallel(
            self.task,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
        )
        wrapped.broadcast_buffers = config.broadcast_buffers  # the argument's name depends on PyTorch's version
        return wrapped

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return model.no_sync() if not enabled and isinstance(model, DistributedDataParallel) else _NOTHING


def prepare(task: ModelHolder, config: PrepareConfig, dist: DistConfig, precision: Precision, rank: Rank) -> Strategy:
    """Prepare a task whose model has its first weights for training: all steps, in order.

    Create the optimizer, the average and all else that holds parameters after this: FSDP replaces them.

    Raises:
        UserError: a pattern matches nothing, or the model does not fit the config.
    """
    is_sharded = dist.strategy == "fsdp" and not rank.is_alone
    precision.cast(task)
    if dist.sync_bn and not rank.is_alone:
        task.model = nn.SyncBatchNorm.convert_sync_batchnorm(task.model)
    if config.channels_last and is_sharded:
        raise UserError("prepare.channels_last: dist.strategy fsdp needs contiguous weights; turn it off, or use ddp")
    if config.channels_last:
        # A convolution with such a weight also gives its input and output this order.
        task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # absent from the stubs
    unfreeze = freeze(
        task, config.freeze
    )  # before wrapping: DDP waits for a gradient of every parameter that can have one
    recomputed, compiled, blocks = check_patterns(task, config)
    for module in recomputed.values():
        recompute_in_backward(module)
    if config.compile.enabled:
        # Gathering weights block by block cannot be compiled, so each block is compiled on its own.
        compiled = compiled or (is_sharded and blocks) or recomputed or {"": task.model}
        options = config.compile
        mode = {"mode": options.mode} if options.backend == "inductor" else {}  # torch refuses it for other backends
        for module in compiled.values():  # with recomputation, which the compiler plans too
            module.compile(backend=options.backend, dynamic=options.dynamic, fullgraph=options.fullgraph, **mode)
        logger.info("compiled at the first step: {}", ", ".join(compiled) or type(task.model).__name__)
    strategy: Strategy
    if is_sharded:
        from common.model.fsdp import Sharded  # the import takes 0.8 s, and most runs do not need it

        strategy = Sharded(task, blocks.values(), precision, config.fsdp, broadcast=dist.broadcast_buffers, rank=rank)
    elif rank.is_alone:
        if dist.strategy == "fsdp":
            logger.info("dist.strategy fsdp has no effect on a single process")
        strategy = Strategy(task.to(rank.device), precision)
    else:
        strategy = Replicated(task.to(rank.device), precision, dist)
    strategy.frozen = config.freeze, unfreeze
    strategy.about += ", channels last" if config.channels_last else ""
    strategy.about += ", compiled" if config.compile.enabled else ""
    return strategy


def check_patterns(task: nn.Module, config: PrepareConfig) -> tuple[dict[str, nn.Module], ...]:
    """The modules to recompute, to compile and to gather, by name. Raises `UserError` for a pattern without a match."""
    matched(config.freeze, parameter_names(task), "prepare.freeze")
    return (
        _match_modules(task, config.activation_checkpointing, "prepare.activation_checkpointing"),
        _match_modules(task, config.compile.blocks, "prepare.compile.blocks"),
        _match_modules(task, config.fsdp.blocks, "prepare.fsdp.blocks"),
    )


def _match_modules(task: nn.Module, patterns: Sequence[str], key: str) -> dict[str, nn.Module]:
    """The modules below a task's model that any of `patterns` matches, except those inside another match.

    Raises:
        UserError: a pattern matches nothing, or a list of modules, which is never called itself.
    """
    modules = {name: module for name, module in task.named_modules() if name}  # task and model have the name ""
    chosen: dict[str, nn.Module] = {}
    for name in matched(patterns, list(modules), key):
        if any(name.startswith(f"{above}.") for above in chosen):
            continue
        if type(modules[name]).forward is nn.Module.forward:
            kind = type(modules[name]).__name__
            raise UserError(f"{key}: {name} is a {kind}, which is never called; name what is in it: {name}.*")
        chosen[name] = modules[name]
    return chosen
