"""Any optimizer of `torch.optim` by name, others by import path, over the parameters that are trained."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from itertools import islice
from operator import methodcaller
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from common.base.errors import UserError
from common.base.nested import map_tensors
from common.base.parts import installed, needs
from common.config import Problem, section
from common.config.arguments import check_arguments, fit_arguments, is_foreign, parameter_names
from common.config.registry import import_path
from common.distributed.collectives import is_sharded
from common.optim.groups import Group, GroupConfig, log_groups, parameter_groups

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
        Field(description="parameters with their own lr, weight decay or optimizer: [{match: head.*, lr_mult: 9}]"),
    ] = field(default_factory=list)

    def kind(self, group: Group | GroupConfig) -> tuple[str, dict[str, Any]]:
        """Return the class and the arguments of the optimizer of a group."""
        if group.optim_type is None:
            return self.optim_type, {**self.args, **group.args}
        return group.optim_type, dict(group.args)

    def problems(self) -> Iterator[Problem]:
        """An unknown optimizer, arguments that it rejects, or a group with two learning rates."""
        yield from self._problems("", self.optim_type, self.args, self.weight_decay)
        for at, group in enumerate(self.groups):
            if group.lr is not None and group.lr_mult != 1:
                yield Problem(
                    f"groups[{at}].lr", group.lr, "is the learning rate, and lr_mult is one too", "remove one"
                )
            decay = self.weight_decay if group.weight_decay is None else group.weight_decay
            if group.optim_type is not None or group.args or group.weight_decay:
                yield from self._problems(f"groups[{at}].", *self.kind(group), decay)

    def _problems(self, key: str, name: str, args: dict[str, Any], decay: float) -> Iterator[Problem]:
        try:
            cls = optimizer_class(name)
        except UserError as error:
            yield Problem(f"{key}optim_type", name, str(error))
            return
        known = parameter_names(cls)
        label = f"optim_type {cls.__name__}"
        if decay and "weight_decay" not in known:
            yield Problem(f"{key}weight_decay", decay, f"{label} has none", "set it to 0")
        provided = tuple(name for name in _PROVIDED if name in known)
        is_of_torch = cls.__module__.startswith("torch.optim")
        strict = is_of_torch or not is_foreign(cls)
        wrong = list(check_arguments(cls, args, f"{key}args", lambda: label, provided, strict=strict))
        yield from wrong
        if args and is_of_torch and not wrong:
            try:
                cls([torch.zeros(1, 1)], lr=1.0, **fit_arguments(cls, args))  # type: ignore[call-arg]
            except Exception as error:  # noqa: BLE001 - of whatever kind: it refuses a value
                yield Problem(f"{key}args", args, f"{label} refuses these: {error}")
        if not needs_closure(cls):
            return
        if key:
            yield Problem(f"{key}optim_type", name, "needs a closure, and so all parameters")
        elif "closures" not in installed():
            yield Problem("optim_type", name, needs("closures"))


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

    It takes over the state that the optimizer `before` it has of parameters whose optimizer is the same but for rate
    and decay. Raises `UserError` when nothing is trainable, or when the optimizer cannot train these parameters.
    """
    kinds = dict[tuple[type[Optimizer], str], tuple[dict[str, Any], list[dict[str, Any]]]]()
    for group in parameter_groups(config, model, chosen):
        cls = optimizer_class(group.pop("optim_type"))
        args = group.pop("args")
        if "weight_decay" not in parameter_names(cls):
            del group["weight_decay"]
        if cls is not optimizer_class(config.optim_type):
            group["optim_type"] = f"{cls.__module__}.{cls.__qualname__}"  # saved: states of two classes do not fit
        kinds.setdefault((cls, str(args)), (args, []))[1].append(group)
    parts = [_build_part(cls, config, args, groups, model) for (cls, _), (args, groups) in kinds.items()]
    optimizer = parts[0]
    if len(parts) > 1:
        optimizer = Several(parts)
        _watch_state(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(map(needs_closure, parts)) and (len(parts) > 1 or any(map(is_sharded, parameters))):
        rule = "needs the whole gradient in one place: use dist.strategy ddp, and no other optimizer for a group"
        raise UserError(f"optim.optim_type {config.optim_type} {rule}")
    if all(parameter.device.type == "cpu" for parameter in parameters):
        for group in optimizer.param_groups:
            if group.get("foreach", 0) is None and group.get("fused", 0) is None:
                group["foreach"] = False  # what torch would choose anew in each step, for 20 us
    if len(optimizer.param_groups) > 1:
        log_groups(optimizer.param_groups)
    if before is not None:
        _take_over(optimizer, before)
    return optimizer


def needs_closure(optimizer: Optimizer | type[Optimizer]) -> bool:
    """Return whether `step` must be given a function that computes the loss again and returns it (LBFGS)."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _build_part(
    cls: type[Optimizer], config: OptimizerConfig, args: dict[str, Any], groups: list[dict[str, Any]], model: nn.Module
) -> Optimizer:
    """Build an optimizer. Raises `UserError` if it refuses these parameters."""
    try:
        arguments = fit_arguments(cls, args)
        if "weight_decay" in parameter_names(cls):
            # Always, so that 0 means 0: AdamW's own default would be 0.01.
            arguments["weight_decay"] = config.weight_decay
        optimizer = cls(groups, lr=config.lr, **arguments)  # type: ignore[call-arg]  # the signature was checked
    except Exception as error:
        hint = "optim.groups can give some parameters another optim_type"
        raise UserError(f"optim_type {cls.__name__} cannot train {type(model).__name__}: {error}; {hint}") from error
    _watch_state(optimizer)
    return optimizer


def _own(cls: type[Optimizer], group: dict[str, Any]) -> dict[str, Any]:
    """Return what an optimizer itself keeps in a group: a count of steps, an estimate."""
    configured = {"name", "params", "param_names", "optim_type", *parameter_names(cls)}
    return {key: value for key, value in group.items() if key not in configured}


def _take_over(optimizer: Optimizer, before: Optimizer) -> None:
    if needs_closure(before):
        return
    varied = {"lr": None, "weight_decay": None}
    old = {
        parameter: (type(part), part.defaults | varied, group)
        for part in parts_of(before)
        for group in part.param_groups
        for parameter in group["params"]
    }
    for part in parts_of(optimizer):
        kind = (type(part), part.defaults | varied)
        for group in part.param_groups:
            kept = [parameter for parameter in group["params"] if parameter in old and old[parameter][:2] == kind]
            for parameter in kept:
                if parameter in before.state:
                    optimizer.state[parameter] = before.state[parameter]
            if kept:
                group.update(_own(type(part), old[kept[0]][2]))


def _watch_state(optimizer: Optimizer) -> None:
    optimizer.register_load_state_dict_pre_hook(_fit_loaded_state)
    optimizer.register_load_state_dict_post_hook(_take_loaded_state)


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
    other = sorted(saved.keys() ^ set(names))
    if other:
        holds = f"holds {other[0]}, which is not trained now" if other[0] in saved else f"does not hold {other[0]}"
        hint = "start a new run from the weights with progress.start_epoch 0"
        raise UserError(f"the saved optimizer state {holds} ({len(other)} parameters differ); {hint}")
    # The config's values win: weight decay, betas, the implementation. Others are the optimizer's own; the rate, which
    # the schedule sets before each step, is that of the last one.
    kinds = [type(part) for part in parts_of(optimizer) for _ in part.param_groups]
    for cls, group in zip(kinds, groups, strict=True):
        for name in group["param_names"]:
            old = saved[name][1].get("optim_type")
            if old != group.get("optim_type"):
                rule = f"{name} had {old or 'that of optim'}, and the state of one optimizer does not fit another"
                raise UserError(
                    f"optim.groups: another optim_type: {rule}; start a new run with progress.start_epoch 0"
                )
        _, before = saved[group["param_names"][0]]
        group |= _own(cls, before) | {"lr": before["lr"]}
    optimizer.loaded = {  # type: ignore[attr-defined]  # for the hook that follows
        parameter: state["state"].get(saved[name][0], {}) for name, parameter in zip(names, parameters, strict=True)
    }
    return {**state, "state": {}, "param_groups": groups}


def _take_loaded_state(optimizer: Optimizer) -> None:
    """Put the state in its place. Torch would convert it to the parameters' type: an fp32 average of bf16 weights."""
    for group in optimizer.param_groups:
        is_step_on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            for name, value in optimizer.loaded[parameter].items():  # type: ignore[attr-defined]
                if name != "step" or is_step_on_device:
                    value = map_tensors(value, methodcaller("to", parameter.device))
                optimizer.state[parameter][name] = _laid_out_like(parameter, value)
    del optimizer.loaded  # type: ignore[attr-defined]


def _laid_out_like(parameter: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


class Several(Optimizer):
    """Steps each of `parts`. They work on its `state` and its `param_groups`, so it is saved and scheduled as one."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        groups = []
        for part in parts:
            groups += part.param_groups
        super().__init__(groups, {})
        for part in parts:
            self.state.update(part.state)  # some have a state before their first step
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give each part its share, also of what was loaded."""
        super().__setstate__(state)
        rest = iter(self.param_groups)
        for part in self.parts:
            groups = list(islice(rest, len(part.param_groups)))
            part.__setstate__({"state": self.state, "param_groups": groups})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns no loss
        """Step the parts that have gradients: an update of the task may train only some."""
        assert closure is None
        for part in self.parts:
            if any(parameter.grad is not None for group in part.param_groups for parameter in group["params"]):
                part.step()


def parts_of(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return the optimizers that `optimizer` consists of: often just itself."""
    return optimizer.parts if isinstance(optimizer, Several) else [optimizer]
