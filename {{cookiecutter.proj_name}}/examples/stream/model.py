"""A small network for a series of numbers."""

from torch import Tensor, nn


class SeriesModel(nn.Module):
    """Two hidden layers.

    Args:
        past: numbers given.
        width: features of a hidden layer.
    """

    def __init__(self, past: int = 8, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(past, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, past: Tensor) -> Tensor:
        """Map numbers (B, past) to the number after them, (B, 1)."""
        return self.layers(past)
