"""Modules chosen by patterns over their full dotted names."""

from collections.abc import Sequence

from torch import nn

from common.base.errors import UserError
from common.config.names import matched


def matched_modules(task: nn.Module, patterns: Sequence[str], key: str) -> dict[str, nn.Module]:
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


def check_names(task: nn.Module) -> None:
    """Refuse a task in which a part of the model and another part have the same name."""
    names = [name for name, _ in task.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in task.named_buffers(remove_duplicate=False)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{type(task).__name__} and its model both have a tensor called {twice[0]}; rename one of them")
