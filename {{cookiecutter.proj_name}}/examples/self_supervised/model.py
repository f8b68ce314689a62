"""The student: an encoder, which is the result, and a head that only the training needs."""

from torch import Tensor, nn


class Student(nn.Module):
    """Encoder and head (Caron et al. 2021), with group normalisation.

    Args:
        features: numbers by which the encoder describes an image.
        width: channels of the first convolution, a multiple of 4.
        groups: groups that the head divides images into.
    """

    def __init__(self, features: int = 8, width: int = 16, groups: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * width, features),
        )
        self.groups = groups
        self.head = nn.Sequential(nn.Linear(features, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, groups))

    def forward(self, image: Tensor) -> Tensor:
        """Map images (B, 1, 8, 8) to logits (B, groups)."""
        return self.head(self.encoder(image))
