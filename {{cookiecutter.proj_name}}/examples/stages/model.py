"""A classifier of two parts: a backbone, which could come from another training, and a head."""

from torch import Tensor, nn


class TwoParts(nn.Module):
    """A convolutional backbone and a linear head.

    Args:
        classes: number of classes.
        width: channels after the first convolution.
    """

    def __init__(self, classes: int = 10, width: int = 32) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Map images (B, 1, 8, 8) to logits (B, classes)."""
        return self.head(self.backbone(image))
