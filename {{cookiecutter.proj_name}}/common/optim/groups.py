"""Which parameters have which optimizer, learning rate and weight decay, by config or task."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple

import torch
from loguru import logger
from pydantic import Field
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from common.base.errors import UserError
from common.base.parts import installed, needs
from common.config import Problem, section
from common.config.arguments import check_arguments, fit_arguments, is_foreign, parameter_names
from common.config.problem import match_names
from common.config.registry import import_path

_NO_DECAY = ".no_decay"  # ends the name of the part of a group that has no weight decay
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# Arguments with config keys of their own (lr, weight_decay), and the parameters themselves.
_PROVIDED = ("params", "lr", "weight_decay")


class Group(NamedTuple):
    """Parameters with a learning rate, a weight decay or an optimizer of their own.

    `lr` is a factor of `base_lr`, which is optim.lr if it is None. With `weight_decay` None, optim.weight_decay
    applies. With `optim_type` None, the optimizer is optim.optim_type, and `args` override optim.args.
    """

    name: str
    parameters: Iterable[nn.Parameter]
    lr: float = 1.0
    weight_decay: float | None = None
    optim_type: str | None = None
    args: Mapping[str, Any] = {}
    base_lr: float | None = None


@section
class GroupConfig:
    """Parameters with a learning rate, a weight decay or an optimizer of their own."""

    match: Annotated[str | list[str], Field(min_length=1, description='parameters by full name, as in "backbone.*"')]
    lr: Annotated[float | None, Field(gt=0.0, description="learning rate, as in torch; null: optim.lr x lr_mult")] = (
        None
    )
    lr_mult: Annotated[float, Field(gt=0.0, description="factor of optim.lr")] = 1.0
    weight_decay: Annotated[float | None, Field(ge=0.0, description="null: that of optim")] = None
    ndim: Annotated[int | None, Field(ge=0, description="only those with this many dimensions; 2: matrices")] = None
    optim_type: Annotated[str | None, Field(description="a class other than optim.optim_type, with its args")] = None
    args: Annotated[dict[str, Any], Field(description="arguments of optim_type; without one, override optim.args")] = (
        field(default_factory=dict)
    )
    name: Annotated[str | None, Field(min_length=1, description="for the log; null: made from match")] = None


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
        Field(description="no weight decay; auto: biases, norms, 1-D, and the modules' no_weight_decay()"),
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
        """An unknown optimizer, arguments that it does not have, or a group with two learning rates."""
        yield from _problems("", self.optim_type, self.args, self.weight_decay)
        for at, group in enumerate(self.groups):
            if group.lr is not None and group.lr_mult != 1:
                rule = "is the learning rate, and lr_mult is one too"
                yield Problem(f"groups[{at}].lr", group.lr, rule, "remove one")
            decay = group.weight_decay
            if decay is None:
                decay = self.weight_decay
            if group.optim_type is not None or group.args or group.weight_decay:
                yield from _problems(f"groups[{at}].", *self.kind(group), decay)


def _problems(
    key: str,
    name: str,
    args: dict[str, Any],
    decay: float,
) -> Iterator[Problem]:
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
    path = name
    if "." not in name and ":" not in name:
        by_name = {known.lower(): known for known in vars(torch.optim)}
        path = f"torch.optim.{by_name.get(name.lower(), name)}"
    target = import_path(path)
    if not (isinstance(target, type) and issubclass(target, Optimizer)):
        raise UserError(f"{name} is not derived from torch.optim.Optimizer")
    return target


def needs_closure(optimizer: Optimizer | type[Optimizer]) -> bool:
    """Return whether `step` must be given a function that computes the loss again and returns it (LBFGS)."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def parameter_groups(
    config: OptimizerConfig,
    task: nn.Module,
    chosen: Iterable[Group] = (),
) -> list[dict[str, Any]]:
    """Return the trainable parameters in named groups: those `chosen` as given there, all others as configured.

    A group is {"name", "params": [(name, parameter), ...], "lr", "weight_decay", "optim_type", "args"}. Each parameter
    is in exactly one.

    Raises:
        UserError: no parameter is trainable, a pattern matches nothing, or a parameter is in two groups.
    """
    names = dict(task.named_parameters(remove_duplicate=False))
    group_of = _assign(_configured(config.groups, names), names, "optim.groups")
    group_of |= _assign(chosen, names, "groups()")
    without_decay = _without_decay(config.no_decay, task, names)
    rest = Group("rest" if group_of else "all", ())
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in task.named_parameters():
        if not parameter.requires_grad:
            continue
        part = group_of.get(parameter, rest)
        label = part.name
        decay = part.weight_decay
        if decay is None:
            decay = config.weight_decay
        if decay and parameter in without_decay:
            label += _NO_DECAY
            decay = 0.0
        base_lr = part.base_lr
        if base_lr is None:
            base_lr = config.lr
        optim_type, args = config.kind(part)
        options = {
            "lr": base_lr * part.lr,
            "weight_decay": decay,
            "optim_type": optim_type,
            "args": args,
        }
        group = groups.setdefault(label, {"name": label, "params": [], **options})
        if not group.items() >= options.items():
            raise UserError(f"two groups of parameters are called {label}; give one of them another name")
        group["params"].append((name, parameter))
    if not groups:
        raise UserError(f"{type(task).__name__}: none of its {len(names)} parameters requires a gradient")
    return list(groups.values())


def log_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Log a table of an optimizer's groups."""
    width = max(len(group["name"]) for group in groups)
    rows = [f"  {'':<{width}}     tensors     parameters        lr  weight decay"]
    for group in groups:
        count = len(group["params"])
        numbers = sum(parameter.numel() for parameter in group["params"])
        decay = group.get("weight_decay", 0.0)
        row = f"  {group['name']:<{width}}  {count:>10,}  {numbers:>13,}  {group['lr']:.2e}  {decay:>12g}"
        rows.append(f"{row}  {group.get('optim_type', '').rpartition('.')[2]}".rstrip())
    logger.info("{} parameter groups:\n{}", len(groups), "\n".join(rows))


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """Return the current learning rates by the group's name; in the course of a run the names stay the same.

    Parts with and without weight decay share one.
    """
    rates: dict[str, float] = {}
    for group in optimizer.param_groups:
        name = str(group.get("name", "all"))
        rates[name.removesuffix(_NO_DECAY)] = float(group["lr"])
    return rates


def _assign(
    groups: Iterable[Group],
    names: Mapping[str, nn.Parameter],
    where: str,
) -> dict[nn.Parameter, Group]:
    """Return the group of each parameter. Raises `UserError` for a parameter in two, or of something else."""
    name_of = {parameter: name for name, parameter in names.items()}
    found: dict[nn.Parameter, Group] = {}
    for group in groups:
        for parameter in group.parameters:
            if parameter not in name_of:
                shape = tuple(parameter.shape)
                raise UserError(f"{where}: {group.name} has a parameter of shape {shape} that is not part of the task")
            other = found.setdefault(parameter, group)
            if other is not group:
                both = f"{name_of[parameter]} is in {other.name} and in {group.name}"
                raise UserError(f"{where}: {both}: each parameter may be in one group only; narrow one of them")
    return found


def _configured(
    entries: Sequence[GroupConfig],
    names: Mapping[str, nn.Parameter],
) -> Iterator[Group]:
    for at, entry in enumerate(entries):
        patterns = entry.match
        if isinstance(patterns, str):
            patterns = [patterns]
        matched = "+".join(pattern.strip("*.") for pattern in patterns)
        inside = []
        for name in match_names(patterns, list(names), f"optim.groups[{at}].match"):
            if entry.ndim in (None, names[name].dim()):
                inside.append(names[name])
        if not inside:
            rule = f"no parameter matching {entry.match} has {entry.ndim} dimensions"
            raise UserError(f"optim.groups[{at}].ndim: {rule}")
        yield Group(
            entry.name or matched or entry.optim_type or "matched",
            inside,
            entry.lr_mult,
            entry.weight_decay,
            entry.optim_type,
            entry.args,
            entry.lr,
        )


def _without_decay(
    patterns: str | list[str],
    task: nn.Module,
    names: Mapping[str, nn.Parameter],
) -> set[nn.Parameter]:
    """Return the parameters without weight decay."""
    if patterns == "auto":
        patterns = ["auto"]
    listed = [pattern for pattern in patterns if pattern != "auto"]
    exempt = {names[name] for name in match_names(listed, list(names), "optim.no_decay")}
    if "auto" not in patterns:
        return exempt
    exempt.update(parameter for parameter in names.values() if parameter.dim() < 2)
    for module in task.modules():
        inside = dict(module.named_parameters(remove_duplicate=False))
        if isinstance(module, _NORMS):
            exempt.update(inside.values())
        listing = getattr(module, "no_weight_decay", None)
        if callable(listing):
            # timm's models also list names that do not exist.
            exempt.update(inside[name] for name in listing() if name in inside)
    return exempt
