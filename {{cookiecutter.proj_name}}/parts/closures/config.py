"""What does not work with an optimizer that computes the loss several times in a step."""

from collections.abc import Iterator
from typing import Any

from common.base.errors import UserError
from common.config import Problem
from common.optim.groups import needs_closure, optimizer_class


def problems(config: Any) -> Iterator[Problem]:
    """Settings that need a step which computes the loss once."""
    name = config.optim.optim_type
    try:
        if not needs_closure(optimizer_class(name)):
            return
    except UserError:  # reported where the key is
        return
    if config.precision.mode == "fp16":
        yield Problem("precision.mode", "fp16", f"torch cannot scale the loss for {name}", "use bf16")
    bad_steps = getattr(config.optim, "bad_steps", None)
    if bad_steps is not None and bad_steps.is_active:
        rule = f"{name} changes weights before a step can be judged"
        yield Problem("optim.bad_steps.action", bad_steps.action, rule, "use stop, without spike")
