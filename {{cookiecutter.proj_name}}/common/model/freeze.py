"""Parts of a model that are not trained."""

from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import TypeVar

from loguru import logger
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from common.base.errors import UserError
from common.config.problem import join_names, match_names

M = TypeVar("M", bound=nn.Module)


def fixed(module: M) -> M:
    """Make `module`, such as a teacher, stay as it is: no gradients, always in evaluation mode. Returns it."""
    module.requires_grad_(False)
    _keep_in_evaluation(module)
    return module


def freeze(model: nn.Module, patterns: Sequence[str]) -> Callable[[], None]:
    """Freeze the parameters that any of `patterns` matches, and log their names. Returns a function that undoes it.

    A fully frozen batch norm (any layer with running statistics) stays in evaluation mode: otherwise its
    statistics would change with every batch, and with them the frozen part.

    Raises:
        UserError: a pattern matches nothing.
    """
    names = parameter_names(model)
    chosen = match_names(patterns, names, "prepare.freeze")
    frozen = set(chosen)
    trained = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in frozen and parameter.requires_grad:
            parameter.requires_grad_(False)
            trained.append(parameter)
    norms = []
    for name, module in model.named_modules():
        is_free = isinstance(module, _NormBase) and "train" not in vars(module)
        if is_free and _is_frozen(name, module, names, frozen):
            _keep_in_evaluation(module)
            norms.append(module)
    if chosen:
        counts = f"{len(frozen)} of {len(names)} parameters, {len(norms)} norms in evaluation mode"
        logger.info("frozen: {}: {}", counts, join_names(chosen))

    def unfreeze() -> None:
        for parameter in trained:
            parameter.requires_grad_(True)
        for norm in norms:
            del norm.train
            norm.train()

    return unfreeze


def parameter_names(model: nn.Module) -> list[str]:
    """Return all parameter names, including further names of shared parameters."""
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def check_trained(model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
    """Raise `UserError` unless just these can have a gradient: DDP and the optimizer rely on it."""
    trained = set(trained)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != (parameter in trained):
            change = "frozen"
            if parameter.requires_grad:
                change = "unfrozen"
            raise UserError(
                f"{name} was {change} after the model was prepared: the optimizer and gradient synchronization are not "
                "aware of it. Use prepare.freeze, or do it in the model's __init__. To change it during training, use "
                "stages"
            )


def warn_of_unused(model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
    """Warn of those of the `trained` parameters that got no gradient in the last backward pass."""
    unused = without_gradient(model, trained)
    if unused:
        text = (
            "{} parameters got no gradient in the first step, although they should be trained: {}. Do the model's "
            "forward and the loss use them? If that is intended, name them in prepare.freeze"
        )
        logger.warning(text, len(unused), join_names(unused))


def without_gradient(model: nn.Module, trained: Iterable[nn.Parameter]) -> list[str]:
    """Return names in `model` of those of the `trained` parameters that got no gradient in the last backward pass."""
    unused = {parameter for parameter in trained if parameter.requires_grad and parameter.grad is None}
    return [name for name, parameter in model.named_parameters() if parameter in unused]


def _is_frozen(
    name: str,
    norm: nn.Module,
    names: list[str],
    frozen: set[str],
) -> bool:
    """Return whether all parameters of `norm` are frozen; if it has none, whether all of its parent module are."""
    prefix = f"{name}."
    if not list(norm.parameters()):
        prefix = name.removesuffix(name.rpartition(".")[2])
    inside = {name for name in names if name.startswith(prefix)}
    return bool(inside) and inside <= frozen


def _keep_in_evaluation(module: nn.Module) -> None:
    """Make `module.train()` do nothing, also when a parent module calls it, and in a copy of the module."""
    module.eval()
    setattr(module, "train", MethodType(_keep_mode, module))  # noqa: B010 - the type checker takes a method as fixed


def _keep_mode(module: M, mode: bool = True) -> M:
    return module
