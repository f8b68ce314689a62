"""The example model: a small convolutional classifier for images of 3 x 3 pixels and more."""

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from common.config.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class ConvModel(nn.Module):
    """Two convolution stages, average pooling, one linear layer.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        width: channels after the first stage; the second has twice as many.
        dropout: probability of dropping a feature before the last layer, 0..1.
    """

    def __init__(self, in_channels: int = 1, classes: int = 10, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _stage(in_channels, width),
            _stage(width, width),
            nn.MaxPool2d(2, ceil_mode=True),
            _stage(width, 2 * width),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(8 * width, classes))

    def forward(self, image: Tensor) -> Tensor:
        """Map images (B, C, H, W), float in 0..1, to logits (B, classes)."""
        return self.head(_quarters(self.features(image)))


def _quarters(x: Tensor) -> Tensor:
    """Average each quarter of a map: AdaptiveAvgPool2d(2), whose own gradient on a GPU is not deterministic."""
    height, width = x.shape[2:]
    return avg_pool2d(x, ((height + 1) // 2, (width + 1) // 2), (height // 2, width // 2))


def _stage(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )
