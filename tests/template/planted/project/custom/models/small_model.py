"""A small network on features that are not trained."""

import torch
from torch import Tensor, nn

from common.config.registry import MODEL_REGISTRY
from common.task import fixed


@MODEL_REGISTRY.register()
class SmallModel(nn.Module):
    """Fixed features of the image, a hidden layer of `width` features, one linear layer to the classes."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.stem = fixed(stem)
        self.hidden = nn.Linear(4 * 64, width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Map images (B, 1, 8, 8), float in 0..1, to logits (B, classes)."""
        features = self.stem(image).flatten(1)
        hidden = torch.relu(self.hidden(features))
        return self.head(hidden)
