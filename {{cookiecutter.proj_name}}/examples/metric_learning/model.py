"""A network that maps images to points on a sphere."""

from torch import Tensor, nn


class Embedder(nn.Module):
    """Two convolutions and a linear layer. Images with a small angle between their points are alike.

    Args:
        dimensions: numbers per point.
        width: channels of the first convolution.
    """

    def __init__(self, dimensions: int = 8, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * width, dimensions),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Map images (B, 1, 8, 8) to points of length 1 (B, dimensions)."""
        return nn.functional.normalize(self.layers(image))
