"""Parts of a model that are not trained."""

from collections.abc import Iterable, Sequence
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
    keep_in_evaluation(module)
    return module


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that any of `patterns` matches, and log their names.

    A fully frozen batch norm (any layer with running statistics) stays in evaluation mode: otherwise its
    statistics would change with every batch, and with them the frozen part.

    Raises:
        UserError: a pattern matches nothing.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    chosen = match_names(patterns, list(parameters), "prepare.freeze")
    frozen = {parameters[name] for name in chosen}
    for parameter in frozen:
        parameter.requires_grad_(False)
    norms = 0
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if not isinstance(module, _NormBase) or "train" in vars(module):
            continue
        inside = set(module.parameters())
        if not inside:  # then those of its parent module decide
            inside = set(modules[name.rpartition(".")[0]].parameters())
        if inside and inside <= frozen:
            keep_in_evaluation(module)
            norms += 1
    if chosen:
        counts = f"{len(chosen)} of {len(parameters)} parameters, {norms} norms in evaluation mode"
        logger.info("frozen: {}: {}", counts, join_names(chosen))


def check_trained(model: nn.Module, trained: Iterable[nn.Parameter]) -> None:
    """Raise `UserError` unless just these can have a gradient: DDP and the optimizer rely on it."""
    trained = set(trained)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad != (parameter in trained):
            raise UserError(
                f"{name} was frozen or unfrozen after the model was prepared: the optimizer and gradient "
                "synchronization are not aware of it. Use prepare.freeze, or do it in the model's __init__. To change "
                "it during training, use stages"
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


def without_gradient(
    model: nn.Module,
    trained: Iterable[nn.Parameter],
) -> list[str]:
    """Return names in `model` of those of the `trained` parameters that got no gradient in the last backward pass."""
    unused = {parameter for parameter in trained if parameter.requires_grad and parameter.grad is None}
    return [name for name, parameter in model.named_parameters() if parameter in unused]


def keep_in_evaluation(module: nn.Module) -> None:
    """Make `module.train()` do nothing, also when a parent module calls it, and in a copy of the module."""
    module.eval()
    setattr(module, "train", MethodType(_keep_mode, module))  # noqa: B010 - the type checker takes a method as fixed


def _keep_mode(module: M, mode: bool = True) -> M:
    return module
