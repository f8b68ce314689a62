"""A network that predicts a number and how uncertain it is."""

from torch import Tensor, nn


class MeanAndVariance(nn.Module):
    """Two hidden layers. The features are shifted to -1..1, and the outputs scaled to the target.

    Args:
        features: number of features.
        width: units per hidden layer.
        centre, scale: rough mean and standard deviation of the target.
    """

    def __init__(self, features: int = 10, width: int = 64, centre: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )
        self.centre, self.scale = centre, scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map features (B, features), 0..1, to mean and variance of the target, both (B,)."""
        mean, spread = self.layers(2 * x - 1).unbind(dim=1)
        return self.centre + self.scale * mean, self.scale**2 * nn.functional.softplus(spread)
