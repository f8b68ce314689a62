"""Any optimizer of `torch.optim` by name, others by import path, over the parameters that are trained."""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from common.base.errors import UserError
from common.config import Problem, section
from common.config.arguments import check_arguments, fit_arguments, is_foreign, parameter_names
from common.config.registry import import_path
from common.distributed.sharded import is_sharded
from common.optim.groups import Group, GroupConfig, LayerDecayConfig, log_groups, parameter_groups

# Arguments with config keys of their own (lr, weight_decay), and the parameters themselves.
_PROVIDED = ("params", "lr", "weight_decay")


@section
class OptimizerConfig:
    """Which optimizer updates the weights."""

    optim_type: Annotated[
        str, Field(description='class of torch.optim in any case, or an import path "package.module.Class"')
    ] = "AdamW"
    lr: Annotated[float, Field(gt=0.0, description="learning rate, before lr_scheduler's factor")] = 1e-3
    weight_decay: Annotated[float, Field(ge=0.0, description="must be 0 for an optimizer that has none")] = 0.0
    args: Annotated[dict[str, Any], Field(description="its further arguments")] = field(default_factory=dict)
    no_decay: Annotated[
        Literal["auto"] | list[str],
        Field(description="no weight decay for these; auto: biases, norms, 1-D, and what modules list in no_decay()"),
    ] = field(default_factory=list)
    groups: Annotated[
        list[GroupConfig],
        Field(description="parameters with a rate or decay of their own: [{match: backbone.*, lr_mult: 0.1}]"),
    ] = field(default_factory=list)
    layer_decay: LayerDecayConfig = field(default_factory=LayerDecayConfig)

    def problems(self) -> Iterator[Problem]:
        """An unknown optimizer, or arguments that it rejects."""
        try:
            cls = optimizer_class(self.optim_type)
        except UserError as error:
            yield Problem("optim_type", self.optim_type, str(error))
            return
        known = parameter_names(cls)
        decays = {f"groups[{at}].weight_decay": group.weight_decay for at, group in enumerate(self.groups)}
        for key, decay in {"weight_decay": self.weight_decay, **decays}.items():
            if decay and "weight_decay" not in known:
                yield Problem(key, decay, f"optim_type {cls.__name__} has none", "set it to 0")
        provided = tuple(name for name in _PROVIDED if name in known)
        strict = cls.__module__.startswith("torch.optim") or not is_foreign(cls)
        label = f"optim_type {cls.__name__}"
        wrong = list(check_arguments(cls, self.args, "args", lambda: label, provided, strict=strict))
        yield from wrong
        if self.args and not wrong and cls.__module__.startswith("torch.optim"):
            # torch checks values on construction; one number is enough to find errors before the model exists.
            # Skipped without arguments, as for --help: the first optimizer of a process takes torch a second.
            try:
                _construct(cls, self, [nn.Parameter(torch.zeros(1, 1))])
            except (TypeError, ValueError, RuntimeError) as error:
                yield Problem("args", self.args, f"optim_type {cls.__name__} rejects them: {error}")


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the class of torch.optim called `name`, in any case, or the one at an import path.

    Raises `UserError` when there is none, or when it is no optimizer.
    """
    by_name = {known.lower(): cls for known, cls in vars(torch.optim).items() if isinstance(cls, type)}
    is_path = "." in name or ":" in name
    target = by_name.get(name.lower()) or import_path(name if is_path else f"torch.optim.{name}")
    if not (isinstance(target, type) and issubclass(target, Optimizer)):
        raise UserError(f"{name} is not derived from torch.optim.Optimizer")
    return target


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, chosen: Iterable[Group] = (), before: Optimizer | None = None
) -> Optimizer:
    """Build the configured optimizer over `model`'s trainable parameters, in named groups: first those `chosen`.

    It takes over the state of the optimizer `before` it if that is the same but for rate and decay.
    Raises `UserError` when nothing is trainable, or when the optimizer cannot train these parameters.
    """
    cls = optimizer_class(config.optim_type)
    groups = parameter_groups(config, model, chosen)
    if "weight_decay" not in parameter_names(cls):
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    named = [pair for group in groups for pair in group["params"]]
    try:
        optimizer = _construct(cls, config, groups)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"optim.optim_type {config.optim_type} cannot train {type(model).__name__}: {error}") from error
    if needs_closure(optimizer) and any(is_sharded(parameter) for _, parameter in named):
        raise UserError(f"optim.optim_type {cls.__name__} needs the whole gradient in one place: use dist.strategy ddp")
    for group in optimizer.param_groups if all(parameter.device.type == "cpu" for _, parameter in named) else ():
        if group.get("foreach", 0) is None and group.get("fused", 0) is None:
            group["foreach"] = False  # what torch would choose anew in each step, for 20 us
    if len(groups) > 1:
        log_groups(optimizer.param_groups)
    optimizer.register_load_state_dict_pre_hook(_fit_loaded_state)
    varied = {"lr": None, "weight_decay": None}
    same = type(before) is cls and before.defaults | varied == optimizer.defaults | varied
    if before is not None and same and not needs_closure(optimizer):
        optimizer.state.update({weight: before.state[weight] for _, weight in named if weight in before.state})
    return optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` must be given a function that computes the loss again and returns it (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _construct(cls: type[Optimizer], config: OptimizerConfig, params: list[Any]) -> Optimizer:
    arguments = fit_arguments(cls, config.args)
    if "weight_decay" in parameter_names(cls):
        # Always, so that 0 means 0: AdamW's own default would be 0.01.
        arguments["weight_decay"] = config.weight_decay
    return cls(params, lr=config.lr, **arguments)  # type: ignore[call-arg]  # the signature was checked


def _fit_loaded_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Match the state by parameter names, whatever its groups; keep this machine's implementation and memory layout.

    Torch matches loaded state by position alone, and takes over options and strides from the machine that saved it.
    """
    saved = {
        name: (number, group)
        for group in state["param_groups"]
        for name, number in zip(group["param_names"], group["params"], strict=True)
    }
    groups = optimizer.state_dict()["param_groups"]
    names = [name for group in groups for name in group["param_names"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if other := sorted(saved.keys() ^ set(names)):
        holds = f"holds {other[0]}, which is not trained now" if other[0] in saved else f"does not hold {other[0]}"
        hint = "start a new run from the weights with progress.start_epoch 0"
        raise UserError(f"the saved optimizer state {holds} ({len(other)} parameters differ); {hint}")
    # The config's values win: weight decay, betas, the implementation. Others are the optimizer's own; the rate, which
    # the schedule sets before each step, is that of the last one.
    configured = {"name", "params", "param_names", *parameter_names(type(optimizer))} - {"lr"}
    for group in groups:
        _, before = saved[group["param_names"][0]]
        group |= {key: value for key, value in before.items() if key in group and key not in configured}
    states = {}
    for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        if values := state["state"].get(saved[name][0]):
            states[number] = {key: _laid_out_like(parameter, value) for key, value in values.items()}
    return {**state, "state": states, "param_groups": groups}


def _laid_out_like(parameter: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
