"""Several optimizers that work as one: docs/parts/optimizers.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from common.base.errors import UserError
from common.optim.groups import OptimizerConfig, needs_closure, optimizer_class
from common.optim.optimizer import build_one, check_saved, parameters_of
from parts.optimizers.config import kind_of


class Several(Optimizer):
    """Steps each of `parts`. They work on its `state` and its `param_groups`, so it is saved and scheduled as one."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._join()

    def _join(self) -> None:
        """Let this optimizer and its parts have the same groups and the same state."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for part in self.parts:
            self.state.update(part.state)  # some have a state before their first step
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns no loss
        """Step the parts that have gradients: an update of the task may train only some."""
        assert closure is None
        for part in self.parts:
            if any(parameter.grad is not None for parameter in parameters_of(part)):
                part.step()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each part its share of a saved state, by the names of the parameters.

        Raises `UserError` if other parameters were trained, or a parameter had an optimizer of another class.
        """
        saved = [name for group in state["param_groups"] for name in group["param_names"]]
        check_saved(saved, self.param_groups)
        self.state.clear()
        for part in self.parts:
            part.load_state_dict(_share(state, part))
        self._join()


def _share(state: Mapping[str, Any], part: Optimizer) -> dict[str, Any]:
    """Return what a saved state holds of the parameters of `part`."""
    names = {name for group in part.param_groups for name in group["param_names"]}
    groups = []
    for group in state["param_groups"]:
        kept = [pair for pair in zip(group["param_names"], group["params"], strict=True) if pair[0] in names]
        if kept:
            groups.append(
                {**group, "param_names": [name for name, _ in kept], "params": [number for _, number in kept]}
            )
    return {**state, "param_groups": groups}


def build(config: OptimizerConfig, model: nn.Module, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Build an optimizer for each class and arguments that the groups ask for; just one if all ask for the same.

    Raises `UserError` if one of them cannot train its parameters.
    """
    main = optimizer_class(config.optim_type)
    groups_of: dict[Any, list[dict[str, Any]]] = {}  # by class and arguments
    arguments = {}
    for group in groups:
        name, args = kind_of(config, group.pop("optim_type", None), group.pop("args", {}))
        cls = optimizer_class(name)
        if cls is not main:
            group["optim_type"] = f"{cls.__module__}.{cls.__qualname__}"  # saved: states of two classes do not fit
        kind = cls, str(args)
        arguments[kind] = args
        groups_of.setdefault(kind, []).append(group)
    parts = [build_one(kind[0], arguments[kind], config, of_kind, model) for kind, of_kind in groups_of.items()]
    if len(parts) == 1:
        return parts[0]
    if any(map(needs_closure, parts)):
        raise UserError("optim.groups: an optimizer with a closure needs all parameters; give no group another one")
    return Several(parts)
