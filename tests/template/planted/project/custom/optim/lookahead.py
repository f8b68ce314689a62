"""Gradient descent with momentum that returns to a slower copy of the weights (Zhang et al., Lookahead, 2019)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Lookahead(Optimizer):
    """Every `every` steps, the weights return half of the way to where they were at the last return."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9, every: int = 4) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change the weights by their gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["velocity"], state["slow"], state["count"] = torch.zeros_like(weight), weight.clone(), 0
                state["count"] += 1
                state["velocity"].mul_(group["momentum"]).add_(weight.grad)
                weight.sub_(group["lr"] * state["velocity"])
                if state["count"] % group["every"] == 0:
                    state["slow"].lerp_(weight, 0.5)
                    weight.copy_(state["slow"])
