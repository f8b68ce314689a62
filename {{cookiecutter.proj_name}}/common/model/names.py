"""Modules chosen by patterns over their full dotted names."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from common.base.errors import UserError
from common.config.names import matched


def match_modules(task: nn.Module, patterns: Sequence[str], key: str) -> dict[str, nn.Module]:
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


class ModelHolder(nn.Module):
    """A module whose parts and tensors within `model` are called as in the model itself, without `model.`."""

    model: nn.Module

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """As of any module, but the parts of the model have the model's own names."""
        for name, module in super().named_modules(*args, **options):
            yield "" if name == "model" else name.removeprefix("model."), module

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """As of any module, but the tensors of the model have the model's own names."""
        return {name.removeprefix("model."): value for name, value in super().state_dict(*args, **options).items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module, with the names of `state_dict`."""
        full = {name.removeprefix("model."): name for name in super().state_dict()}
        return super().load_state_dict({full.get(name, name): each for name, each in state.items()}, strict, assign)
