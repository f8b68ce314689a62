"""Prepares a built task for training."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import field
from typing import Any, Literal

import torch
from loguru import logger
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from common.base.errors import UserError
from common.base.parts import required
from common.config import extensible_section, section
from common.config.problem import match_names
from common.distributed import DistConfig, Rank
from common.model.freeze import freeze, keep_in_evaluation
from common.model.strategy import ModelHolder, Replicated, Strategy
from common.optim.precision import Precision


@section
class CompileConfig:
    """torch.compile. Names of parameters stay as they are. evaluate.py does not compile."""

    enabled: bool = False
    """compile the model: slow first steps, faster ones afterwards"""
    blocks: list[str] = field(default_factory=list)
    """modules to compile one by one; empty: activation_checkpointing, or the whole"""
    backend: str = "inductor"
    """of torch.compile; eager and aot_eager are for debugging"""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """of inductor: how long it searches for faster code"""
    dynamic: bool | None = None
    """true: one graph for all shapes; false: each; null: auto"""
    fullgraph: bool = False
    """error on code that cannot be compiled; false: skip it"""


@extensible_section
class PrepareConfig:
    """What happens to the model before it is trained. Names may be patterns: * matches any text, dots included."""

    freeze: list[str] = field(default_factory=list)
    """parameters that are not trained, by full name, as in "backbone.*" or "*.bias" """
    channels_last: bool = False
    """torch.channels_last for 4-D weights: faster on GPUs"""
    activation_checkpointing: list[str] = field(default_factory=list)
    """modules whose forward is recomputed in the backward pass: less memory, more time"""
    compile: CompileConfig = field(default_factory=CompileConfig)

    @property
    def gathered(self) -> list[str]:
        """Modules whose weights are gathered one at a time, where a part shards them."""
        return []


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
        fixed_names = [name for name, module in task.model.named_modules() if "train" in vars(module)]
        task.model = nn.SyncBatchNorm.convert_sync_batchnorm(task.model)
        for name in fixed_names:
            keep_in_evaluation(task.model.get_submodule(name))
    if config.channels_last:
        # A convolution with such a weight also gives its input and output this order.
        task.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # absent from the stubs
    freeze(task, config.freeze)  # before DDP, which waits for a gradient of all that can have one
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
    names = dict(task.named_parameters(remove_duplicate=False))
    match_names(config.freeze, list(names), "prepare.freeze")
    return (
        _match_modules(task, config.activation_checkpointing, "prepare.activation_checkpointing"),
        _match_modules(task, config.compile.blocks, "prepare.compile.blocks"),
        _match_modules(task, config.gathered, "prepare.fsdp.blocks"),
    )


def _match_modules(
    task: nn.Module,
    patterns: Sequence[str],
    key: str,
) -> Modules:
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


def recompute_in_backward(module: nn.Module) -> None:
    """Make a module keep only the inputs of its forward, which is computed again in the backward pass.

    Gradients stay the same: dropout draws the same numbers again, and running statistics are updated once. The module's
    `forward` is replaced, not the module, so that no name of a parameter changes.
    """
    forward = module.forward
    norms = norms_with_statistics(module)

    @functools.wraps(forward)
    def recompute(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # torch.compile leaves the update of statistics out of the recomputation by itself.
        options: dict[str, Any] = {}
        if not torch.compiler.is_compiling():
            options["context_fn"] = lambda: (nullcontext(), _keep_statistics(norms))
        # Passed as arguments: torch sees these tensors, and restores the random generators of their devices.
        return checkpoint(_call, forward, args, kwargs, use_reentrant=False, **options)

    setattr(module, "forward", recompute)  # noqa: B010 - to the type checker a method cannot be replaced


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return function(*args, **kwargs)


def norms_with_statistics(model: nn.Module) -> list[_NormBase]:
    """Batch norms and the like that keep running statistics."""
    found = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [norm for norm in found if norm.running_mean is not None]


@contextmanager
def _keep_statistics(norms: list[_NormBase]) -> Iterator[None]:
    """Within this context norms compute as usual, but their running statistics do not change."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, count in before:
        norm.momentum = 0.0  # weight of the new batch
        if count is not None:
            norm.num_batches_tracked = count.clone()
    try:
        with _disable_current_modes():  # a counter of operations would count them twice
            yield
    finally:
        for norm, momentum, count in before:
            norm.momentum = momentum
            norm.num_batches_tracked = count
