"""What this part adds to the configuration: an optimizer of its own for each of `optim.groups`."""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from common.base.errors import UserError
from common.config import Problem, section


@section
class GroupConfig:
    """The keys that this part adds to a group of parameters."""

    ndim: Annotated[int | None, Field(ge=0)] = None
    """only those with this many dimensions; 2: matrices"""
    optim_type: str | None = None
    """a class other than optim.optim_type, with its args"""
    args: dict[str, Any] = field(default_factory=dict)
    """arguments of optim_type; without one, override optim.args"""

    def problems_in(self, optim: Any) -> Iterator[Problem]:
        """Yield the problems of the group, and of its optimizer."""
        from common.optim.groups import kind_problems, needs_closure, optimizer_class  # they have sections themselves

        of_core = list(super().problems_in(optim))  # type: ignore[misc]  # the core's class, below this one
        if self.optim_type is None and not self.args:
            yield from of_core
            return
        yield from [problem for problem in of_core if problem.key == "lr"]
        decay = self.weight_decay  # type: ignore[attr-defined]
        if decay is None:
            decay = optim.weight_decay
        name, args = kind_of(optim, self.optim_type, self.args)
        problems = list(kind_problems(name, args, decay))
        yield from problems
        if not problems and needs_closure(optimizer_class(name)):
            yield Problem("optim_type", name, "needs a closure, and so all parameters")

    def select(self, names: Mapping[str, nn.Parameter], key: str) -> Any:
        """Return the group, with its optimizer. Raises `UserError` if no parameter has `ndim` dimensions."""
        group = super().select(names, key)  # type: ignore[misc]
        inside = [parameter for parameter in group.parameters if self.ndim in (None, parameter.dim())]
        if not inside:
            rule = f"no parameter matching {self.match} has {self.ndim} dimensions"  # type: ignore[attr-defined]
            raise UserError(f"{key}.ndim: {rule}")
        name = group.name
        if name == "matched" and self.optim_type:
            name = self.optim_type
        return group._replace(name=name, parameters=inside, optim_type=self.optim_type, args=self.args)


def kind_of(optim: Any, name: str | None, args: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the class and the arguments of a group's optimizer."""
    if name is None:
        return optim.optim_type, {**optim.args, **args}
    return name, dict(args)
