"""Parameter groups: which parameters have which learning rate, weight decay and optimizer, by config or task."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from loguru import logger
from pydantic import Field
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from common.base.errors import UserError
from common.config import section
from common.config.problem import match_names

if TYPE_CHECKING:
    from common.optim.optimizer import OptimizerConfig

_NO_DECAY = ".no_decay"  # ends the name of the part of a group that has no weight decay
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


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


def parameter_groups(
    config: "OptimizerConfig",
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
    groups_of = _assign(_entries(config.groups, names), names, "optim.groups")
    groups_of |= _assign(((group.name, group) for group in chosen), names, "groups()")
    without_decay = _without_decay(config.no_decay, task, names)
    rest = Group("rest" if groups_of else "all", ())
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in task.named_parameters():
        if not parameter.requires_grad:
            continue
        part = groups_of.get(parameter, rest)
        label = part.name
        decay = part.weight_decay
        if decay is None:
            decay = config.weight_decay
        if decay and parameter in without_decay:
            label += _NO_DECAY
            decay = 0.0
        optim_type, args = config.kind(part)
        base_lr = part.base_lr
        if base_lr is None:
            base_lr = config.lr
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
        total = len(list(task.parameters()))
        raise UserError(f"{type(task).__name__}: none of its {total} parameters requires a gradient; unfreeze some")
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
    groups: Iterable[tuple[str, Group]], names: Mapping[str, nn.Parameter], where: str
) -> dict[nn.Parameter, Group]:
    """Return the group of each parameter. Of each pair, the text is what an error calls the group."""
    name_of = {parameter: name for name, parameter in names.items()}
    found: dict[nn.Parameter, tuple[str, Group]] = {}
    for text, group in groups:
        for parameter in group.parameters:
            if parameter not in name_of:
                shape = tuple(parameter.shape)
                raise UserError(f"{where}: {text} has a parameter of shape {shape} that is not part of the task")
            other, known = found.setdefault(parameter, (text, group))
            if known is not group:
                hint = "each parameter may be in one group only; narrow one of them"
                raise UserError(f"{where}: {name_of[parameter]} is in {other} and in {text}: {hint}")
    return {parameter: group for parameter, (_, group) in found.items()}


def _entries(
    entries: Sequence[GroupConfig],
    names: Mapping[str, nn.Parameter],
) -> Iterator[tuple[str, Group]]:
    for at, entry in enumerate(entries):
        patterns = [entry.match] if isinstance(entry.match, str) else entry.match
        matched = "+".join(pattern.strip("*.") for pattern in patterns)
        label = entry.name or matched or entry.optim_type or "matched"
        where = f"optim.groups[{at}]"
        inside = [names[name] for name in match_names(patterns, list(names), f"{where}.match")]
        if entry.ndim is not None:
            inside = [parameter for parameter in inside if parameter.dim() == entry.ndim]
            if not inside:
                raise UserError(f"{where}.ndim: no parameter matching {entry.match} has {entry.ndim} dimensions")
        group = Group(
            label,
            inside,
            entry.lr_mult,
            entry.weight_decay,
            entry.optim_type,
            entry.args,
            entry.lr,
        )
        yield ", ".join(patterns), group


def _without_decay(
    patterns: str | list[str],
    model: nn.Module,
    names: Mapping[str, nn.Parameter],
) -> set[nn.Parameter]:
    """Return the parameters without weight decay."""
    if patterns == "auto":
        patterns = ["auto"]
    listed = [pattern for pattern in patterns if pattern != "auto"]
    exempt = {names[name] for name in match_names(listed, list(names), "optim.no_decay")}
    if "auto" not in patterns:
        return exempt
    exempt |= {parameter for parameter in names.values() if parameter.dim() < 2}
    for module in model.modules():
        inside = dict(module.named_parameters(remove_duplicate=False))
        declared = getattr(module, "no_decay", None)
        chosen: list[str] = []
        if isinstance(module, _NORMS):
            chosen = list(inside)
        elif callable(declared):
            chosen = list(declared())
        exempt |= {inside[name] for name in match_names(chosen, list(inside), f"{type(module).__name__}.no_decay()")}
        of_timm = getattr(module, "no_weight_decay", None)
        if callable(of_timm):  # not all that these models list exists
            exempt |= {inside[name] for name in of_timm() if name in inside}
    return exempt
