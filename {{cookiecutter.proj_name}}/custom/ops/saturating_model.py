"""A model that uses the operator `scale_exp`: a small convolutional network whose features saturate."""

from loguru import logger
from torch import Tensor, nn

from common.config.registry import MODEL_REGISTRY
from custom.ops import implementation, scale_exp


@MODEL_REGISTRY.register()
class SaturatingModel(nn.Module):
    """Two convolution stages, then one linear layer. After each stage, features x become 1 - exp(-max(x, 0)).

    Light absorption and detectors saturate in this way: linear for small x, and never more than 1.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        width: channels after the first stage; the second has twice as many.
    """

    def __init__(self, in_channels: int = 1, classes: int = 10, width: int = 32) -> None:
        super().__init__()
        logger.info("scale_exp: {}", implementation)
        self.first = _stage(in_channels, width)
        self.second = _stage(width, 2 * width)
        self.head = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8 * width, classes))

    def forward(self, image: Tensor) -> Tensor:
        """Map images (B, C, 8, 8), float in 0..1, to logits (B, classes)."""
        return self.head(self.second(self.first(image)))


class Saturation(nn.Module):
    """1 - exp(-max(x, 0)), in 0..1."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same shape."""
        return scale_exp(x.relu(), scale=-1.0, shift=1.0)


def _stage(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        Saturation(),
    )
