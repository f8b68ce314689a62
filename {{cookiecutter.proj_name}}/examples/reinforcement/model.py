"""A pole on a cart (Barto, Sutton and Anderson 1983), and a policy for it."""

from math import radians

import torch
from torch import Tensor, nn

STEPS = 200  # of an episode, at most


class PolicyModel(nn.Module):
    """Two hidden layers each for what to do and for what it is worth.

    Args:
        width: features of a hidden layer.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.policy, self.value = (_mlp(width, outputs) for outputs in (2, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Map states (..., 4) to log-probabilities of left and right (..., 2), and to the value (...)."""
        return self.policy(state).log_softmax(-1), self.value(state).squeeze(-1)


def _mlp(width: int, outputs: int) -> nn.Sequential:
    last = nn.Linear(width, outputs)
    nn.init.zeros_(last.weight)  # at first, both directions are equally probable, and nothing has a value
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), last)


def push(state: Tensor, right: Tensor, time: float = 0.02) -> Tensor:
    """Return the states (B, 4) after carts were pushed with 10 N to the right, or else to the left, for `time` seconds.

    A state is position (m), velocity, angle of the pole (rad) and its velocity. Cart 1 kg, pole 0.1 kg and 1 m.
    """
    velocity, angle, turning = state[:, 1:].unbind(1)
    sin, cos = angle.sin(), angle.cos()
    force = (torch.where(right, 10.0, -10.0) + 0.05 * turning**2 * sin) / 1.1
    turn = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    change = torch.stack([velocity, force - 0.05 * turn * cos / 1.1, turning, turn], dim=1)
    return state + time * change


def has_fallen(state: Tensor) -> Tensor:
    """Return whether the pole leans by more than 12 degrees, or the cart is more than 2.4 m away, (B,)."""
    return (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > radians(12))
