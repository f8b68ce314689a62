"""Which parameters have which learning rate and weight decay, by config or task."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from common.base.errors import UserError
from common.base.parts import installed, needs_part
from common.config import Problem, extensible_section, section
from common.config.arguments import check_arguments, fit_arguments, parameter_names
from common.config.problem import match_names
from common.config.registry import import_path

_NO_DECAY = ".no_decay"  # ends the name of the part of a group that has no weight decay
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# Arguments with config keys of their own (lr, weight_decay), and the parameters themselves.
_PROVIDED = ("params", "lr", "weight_decay")


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


class Group(NamedTuple):
    """Parameters with a learning rate or a weight decay of their own, or an optimizer, which parts/optimizers builds.

    `lr_mult` is a factor of `base_lr`, which is optim.lr if it is None. With `weight_decay` None, optim.weight_decay
    applies. With `optim_type` None, the optimizer is optim.optim_type, and `args` override optim.args.
    """

    name: str
    parameters: Iterable[nn.Parameter]
    lr_mult: float = 1.0
    weight_decay: float | None = None
    optim_type: str | None = None
    args: Mapping[str, Any] = {}
    base_lr: float | None = None


def kind_problems(
    name: str,
    args: Mapping[str, Any],
    decay: float,
) -> Iterator[Problem]:
    """Yield an unknown optimizer, arguments that it does not have or refuses, and a weight decay that it lacks."""
    try:
        cls = optimizer_class(name)
    except UserError as error:
        yield Problem("optim_type", name, str(error))
        return
    known = parameter_names(cls)
    label = f"optim_type {cls.__name__}"
    if decay and "weight_decay" not in known:
        yield Problem("weight_decay", decay, f"{label} has none", "set it to 0")
    provided = tuple(name for name in _PROVIDED if name in known)
    wrong = list(check_arguments(cls, args, "args", label, provided))
    yield from wrong
    if args and cls.__module__.startswith("torch.optim") and not wrong:
        try:
            fitted = fit_arguments(cls, args)
            cls([torch.zeros(1, 1)], lr=1.0, **fitted)  # type: ignore[call-arg]
        except Exception as error:  # noqa: BLE001 - of whatever kind: it refuses a value
            yield Problem("args", args, f"{label} refuses these: {error}")


@extensible_section
class GroupConfig:
    """Parameters with a learning rate or weight decay of their own."""

    match: Annotated[str | list[str], Field(min_length=1)]
    """parameters by full name, as in "backbone.*" """
    lr: Annotated[float | None, Field(gt=0.0)] = None
    """learning rate, as in torch; null: optim.lr x lr_mult"""
    lr_mult: Annotated[float, Field(gt=0.0)] = 1.0
    """factor of optim.lr"""
    weight_decay: Annotated[float | None, Field(ge=0.0)] = None
    """null: that of optim"""
    name: Annotated[str | None, Field(min_length=1)] = None
    """for the log; null: made from match"""

    def problems_in(self, optim: "OptimizerConfig") -> Iterator[Problem]:
        """Yield the problems of a group of the section `optim`: two learning rates, or a decay that is not there."""
        if self.lr is not None and self.lr_mult != 1:
            yield Problem("lr", self.lr, "sets the rate itself, lr_mult a factor of optim.lr", "remove one")
        for problem in kind_problems(optim.optim_type, {}, self.weight_decay or 0.0):
            if problem.key == "weight_decay":
                yield problem

    def select(
        self,
        names: Mapping[str, nn.Parameter],
        key: str,
    ) -> Group:
        """Return the group of these parameters. Raises `UserError` for a pattern of the entry `key` without a match."""
        patterns = self.match
        if isinstance(patterns, str):
            patterns = [patterns]
        label = "+".join(pattern.strip("*.") for pattern in patterns)
        inside = [names[name] for name in match_names(patterns, list(names), f"{key}.match")]
        name = self.name or label or "matched"
        return Group(name, inside, self.lr_mult, self.weight_decay, base_lr=self.lr)


@section
class OptimizerConfig:
    """Which optimizer updates the weights."""

    optim_type: str = "AdamW"
    """class of torch.optim in any case, or an import path "package.module.Class" """
    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    """learning rate, before lr_scheduler's factor"""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """must be 0 for an optimizer that has none"""
    args: dict[str, Any] = field(default_factory=dict)
    """its further arguments"""
    no_decay: Literal["auto"] | list[str] = field(default_factory=list)
    """no weight decay; auto: biases, norms, 1-D, and the modules' no_weight_decay()"""
    groups: list[GroupConfig] = field(default_factory=list)
    """parameters with their own lr or weight decay: [{match: head.*, lr_mult: 9}]"""

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of the optimizer, and of each group."""
        own = list(kind_problems(self.optim_type, self.args, self.weight_decay))
        yield from own
        if not own and needs_closure(optimizer_class(self.optim_type)) and "closures" not in installed():
            yield Problem("optim_type", self.optim_type, needs_part("closures"))
        for at, group in enumerate(self.groups):
            for problem in group.problems_in(self):
                yield replace(problem, key=f"groups[{at}].{problem.key}")


def parameter_groups(
    config: OptimizerConfig,
    task: nn.Module,
    chosen: Iterable[Group],
) -> list[dict[str, Any]]:
    """Return the trainable parameters in named groups: those `chosen` as given there, all others as configured.

    A group is {"name", "params": [(name, parameter), ...], "lr", "weight_decay"}, with "optim_type" and "args" if it
    has an optimizer of its own. Each parameter is in exactly one.

    Raises:
        UserError: no parameter is trainable, a pattern matches nothing, or a parameter is in two groups.
    """
    names = dict(task.named_parameters(remove_duplicate=False))
    configured = [entry.select(names, f"optim.groups[{at}]") for at, entry in enumerate(config.groups)]
    group_of = _assign(configured, names, "optim.groups")
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
        options: dict[str, Any] = {"lr": base_lr * part.lr_mult, "weight_decay": decay}
        if part.optim_type is not None or part.args:
            options |= {"optim_type": part.optim_type, "args": part.args}
        group = groups.setdefault(label, {"name": label, "params": [], **options})
        if group != {"name": label, "params": group["params"], **options}:
            raise UserError(f"two groups of parameters are called {label}; give one of them another name")
        group["params"].append((name, parameter))
    if not groups:
        raise UserError(f"{type(task).__name__}: none of its {len(names)} parameters requires a gradient")
    return list(groups.values())


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """Return the current learning rates by the group's name; in the course of a run the names stay the same.

    Parts with and without weight decay share one.
    """
    rates = {}
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
