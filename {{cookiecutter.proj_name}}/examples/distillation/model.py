"""The student: the first layers of the teacher and a new, small rest."""

from torch import Tensor, nn


class Student(nn.Module):
    """An eighth of the weights of `ConvModel`. `features.0` is the same as there, so it can begin with those weights.

    Args:
        classes: number of classes.
        width: channels.
    """

    def __init__(self, classes: int = 10, width: int = 32) -> None:
        super().__init__()
        first = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.features = nn.Sequential(first)
        self.rest = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, 8, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(128, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Map images (B, 1, 8, 8) to logits (B, classes)."""
        return self.head(self.rest(self.features(image)))
