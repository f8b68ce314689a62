"""A small detector without anchors."""

from torch import Tensor, nn

STRIDE = 2  # pixels of the image per cell of the output, in each direction


class CentreNet(nn.Module):
    """A heat map of the centres of each class, and for each cell the box around a centre in it (Zhou et al. 2019).

    Args:
        classes: number of classes.
        width: channels, a multiple of 4.
    """

    def __init__(self, classes: int = 10, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_stage(1, width // 2),
            *_stage(width // 2, width, stride=STRIDE),
            *_stage(width, width),
            *_stage(width, width, dilation=2),
            *_stage(width, width, dilation=2),
        )
        self.heat = nn.Conv2d(width, classes, kernel_size=1)
        self.box = nn.Conv2d(width, 4, kernel_size=1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Map images (B, 1, H, W) to `heat`, logits (B, classes, H / 2, W / 2), and `box` (B, H / 2, W / 2, 4).

        `box`: a centre's x and y from the corner of its cell, width and height of the box around it, all in cells.
        """
        features = self.features(image)
        heat = self.heat(features) - 4  # so that few cells look like a centre at first (Lin et al. 2017)
        return heat, self.box(features).permute(0, 2, 3, 1)


def _stage(channels: int, out_channels: int, stride: int = 1, dilation: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, out_channels, 3, stride=stride, padding=dilation, dilation=dilation)
    return convolution, nn.GroupNorm(4, out_channels), nn.ReLU()
