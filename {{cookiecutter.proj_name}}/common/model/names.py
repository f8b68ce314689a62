"""Names of a task's modules and tensors: those of its model are the model's own."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from common.base.errors import UserError


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
        """Like `nn.Module.named_modules`, without the `model.` prefix."""
        for name, module in super().named_modules(*args, **options):
            yield "" if name == "model" else name.removeprefix("model."), module

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Like `nn.Module.state_dict`, without the `model.` prefix."""
        return {name.removeprefix("model."): value for name, value in super().state_dict(*args, **options).items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Like `nn.Module.load_state_dict`, with the names of `state_dict`."""
        full = {name.removeprefix("model."): name for name in super().state_dict()}
        return super().load_state_dict({full.get(name, name): each for name, each in state.items()}, strict, assign)
