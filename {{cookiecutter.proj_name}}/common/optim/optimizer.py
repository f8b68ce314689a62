"""Builds the optimizer of the config, and loads its saved state by the parameters' names."""

from collections.abc import Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.optim import Optimizer

from common import import_large
from common.base.errors import UserError
from common.base.nested import map_tensors
from common.base.parts import required
from common.config.arguments import fit_arguments, parameter_names
from common.config.problem import join_names
from common.distributed.collectives import is_sharded
from common.optim.groups import (
    Group,
    OptimizerConfig,
    needs_closure,
    optimizer_class,
    parameter_groups,
)

_ANEW = "start a new run from the weights: --init_from.path FILE --name NEW"


def parts_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return the optimizers that `optimizer` consists of (parts/optimizers): usually just itself."""
    return getattr(optimizer, "parts", [optimizer])


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer, in the order of its state."""
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    chosen: Iterable[Group] = (),
) -> Optimizer:
    """Build the configured optimizer over `model`'s trainable parameters, in named groups: first those `chosen`.

    Raises `UserError` when nothing is trainable, or when the optimizer cannot train these parameters.
    """
    groups = parameter_groups(config, model, chosen)
    import_large("torch._dynamo")  # which torch's first optimizer would import
    if any("args" in group for group in groups):
        several = required("optimizers", "several", "a group with an optimizer of its own")
        optimizer: Optimizer = several.build(config, model, groups)
    else:
        optimizer = build_one(optimizer_class(config.optim_type), config.args, config, groups, model)
    if needs_closure(optimizer) and any(map(is_sharded, parameters_of(optimizer))):
        raise UserError(f"optim.optim_type {config.optim_type} needs whole gradients: use dist.strategy ddp")
    if len(optimizer.param_groups) > 1:
        text = f"{len(optimizer.param_groups)} parameter groups:"
        for group in optimizer.param_groups:
            numbers = sum(parameter.numel() for parameter in group["params"])
            decay = group.get("weight_decay", 0.0)
            text += f"\n  {group['name']}: {numbers:,} parameters, lr {group['lr']:.2e}, weight decay {decay:g}"
        logger.info("{}", text)
    return optimizer


def build_one(
    cls: type[Optimizer],
    args: Mapping[str, Any],
    config: OptimizerConfig,
    groups: list[dict[str, Any]],
    model: nn.Module,
) -> Optimizer:
    """Build an optimizer of `parameter_groups`. Raises `UserError` if it refuses `args` or the parameters."""
    has_decay = "weight_decay" in parameter_names(cls)
    try:
        arguments = fit_arguments(cls, args)
        if has_decay:  # always given, so that 0 means 0: AdamW's own default would be 0.01
            arguments["weight_decay"] = config.weight_decay
        else:
            for group in groups:
                del group["weight_decay"]
        optimizer = cls(groups, lr=config.lr, **arguments)  # type: ignore[call-arg]  # the signature was checked
    except Exception as error:
        hint = "with parts/optimizers, optim.groups can give some parameters another optim_type"
        raise UserError(f"optim_type {cls.__name__} cannot train {type(model).__name__}: {error}; {hint}") from error
    if all(parameter.is_cpu for parameter in parameters_of(optimizer)):
        for group in optimizer.param_groups:
            if group.get("foreach", 0) is None and group.get("fused", 0) is None:
                group["foreach"] = False  # else torch chooses it in each step, which takes 20 us
    optimizer.register_load_state_dict_pre_hook(_fit_loaded_state)
    optimizer.register_load_state_dict_post_hook(_take_loaded_state)
    return optimizer


def own_values(
    optimizer: Optimizer,
    group: dict[str, Any],
) -> dict[str, Any]:
    """Return what an optimizer itself keeps in a group: a count of steps, an estimate."""
    configured = {"name", "params", "param_names", "optim_type", *parameter_names(type(optimizer))}
    return {key: value for key, value in group.items() if key not in configured}


def _fit_loaded_state(
    optimizer: Optimizer,
    state: dict[str, Any],
) -> dict[str, Any]:
    """Match the state by parameter names, whatever its groups; keep this machine's implementation and memory layout.

    Torch matches loaded state by position alone, and takes over options and strides from the machine that saved it.
    """
    saved: dict[str, Any] = {}  # state and group of each parameter
    for group in state["param_groups"]:
        for name, number in zip(group["param_names"], group["params"], strict=True):
            saved[name] = state["state"].get(number, {}), group
    groups = optimizer.state_dict()["param_groups"]
    check_saved(saved, groups)
    loaded: list[dict[str, Any]] = []
    for group in groups:
        for name in group["param_names"]:
            moments, before = saved[name]
            _check_kind(name, before.get("optim_type"), group.get("optim_type"))
            loaded.append(moments)
        # The config's values win: weight decay, betas, the implementation. Others are the optimizer's own; the rate,
        # which the schedule sets before each step, is that of the last one.
        _, before = saved[group["param_names"][0]]
        group |= own_values(optimizer, before)
        group["lr"] = before["lr"]
    optimizer.loaded = loaded  # type: ignore[attr-defined]  # for the hook that follows
    return {**state, "state": {}, "param_groups": groups}


def check_saved(
    saved: Iterable[str],
    groups: Iterable[Mapping[str, Any]],
) -> None:
    """Raise `UserError` unless the saved state has just the trained parameters, which are in `groups`."""
    trained = set()
    for group in groups:
        trained.update(group["param_names"])
    other = sorted(trained.symmetric_difference(saved))
    if other:
        raise UserError(f"the saved optimizer state is not of the trained parameters: {join_names(other)}; {_ANEW}")


def _check_kind(name: str, before: str | None, now: str | None) -> None:
    if before == now:
        return
    if before is not None:
        required("optimizers", "several", f"the checkpoint's {before} for {name}")
    rule = f"{name} had {before or 'that of optim'}, and the state of one optimizer does not fit another"
    raise UserError(f"optim.groups: another optim_type: {rule}; {_ANEW}")


def _take_loaded_state(optimizer: Optimizer) -> None:
    """Put the state in its place. Torch would convert it to the parameters' type: an fp32 average of bf16 weights."""
    loaded = iter(optimizer.loaded)  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        is_step_on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            for name, value in next(loaded).items():
                if name != "step" or is_step_on_device:
                    value = map_tensors(value, methodcaller("to", parameter.device))
                optimizer.state[parameter][name] = _laid_out_like(parameter, value)
    del optimizer.loaded  # type: ignore[attr-defined]


def _laid_out_like(parameter: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    if value.stride() == parameter.stride():
        return value
    fitting = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
    return fitting.copy_(value)
