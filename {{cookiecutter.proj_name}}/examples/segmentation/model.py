"""A small U-Net."""

import torch
from torch import Tensor, nn


class UNet(nn.Module):
    """A class for every pixel (Ronneberger, Fischer and Brox 2015), with group normalisation.

    Not batch normalisation: its statistics are those of one process, so they would depend on how a batch is divided.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        width: channels at full resolution, a multiple of 8; doubled at each of the `depth` halvings.
        depth: how many times the resolution is halved; height and width are multiples of 2**depth.
    """

    def __init__(self, in_channels: int = 1, classes: int = 4, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = _stage(in_channels, width)
        self.down = nn.ModuleList(_stage(width, 2 * width) for width in widths[:-1])
        self.up = nn.ModuleList(_stage(3 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, image: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, classes, H, W)."""
        levels = [self.first(image)]
        for stage in self.down:
            levels.append(stage(nn.functional.max_pool2d(levels[-1], 2)))
        features = levels.pop()
        for stage in self.up:
            features = nn.functional.interpolate(features, scale_factor=2.0)
            features = stage(torch.cat([levels.pop(), features], dim=1))
        return self.head(features)


def _stage(channels: int, out_channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (channels, out_channels):
        convolution = nn.Conv2d(before, out_channels, kernel_size=3, padding=1, bias=False)
        layers += [convolution, nn.GroupNorm(8, out_channels), nn.ReLU()]
    return nn.Sequential(*layers)
