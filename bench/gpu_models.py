"""Three models in plain torch whose sizes everybody knows: ResNet-50, ViT-S/16 and GPT-2 with 124 M parameters.

Each returns the loss of a batch, given the numbers of its samples: the samples themselves are made once, on the device,
so that neither the reading nor the copying of data is a part of what is timed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

POOL = 512  # samples on the device, from which batches are drawn


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3 (with the stride), 1x1 to four times the width, beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, 4 * width, 1),
        )
        same = channels == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(channels, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x), inplace=True)


def convolution(channels: int, width: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Return a convolution without a bias, and its batch norm."""
    layer = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    return layer, nn.BatchNorm2d(width)


class ResNet(nn.Module):
    """ResNet-50: blocks of 3, 4, 6 and 3."""

    def __init__(self, width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                inner = width << stage
                layers.append(Bottleneck(channels, inner, 2 if stage and not number else 1))
                channels = 4 * inner
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.layers(image).mean((2, 3)))


class Block(nn.Module):
    """A block of a transformer, with the norms first."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*parts.unbind(2), is_causal=self.causal)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


class ViT(nn.Module):
    """ViT-S/16: patches of 16 x 16, a token for the class, learned positions."""

    def __init__(self, width: int = 384, depth: int = 12, heads: int = 6, size: int = 224, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // 16) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(image), -1, -1), patches], 1) + self.places
        return self.head(self.norm(self.blocks(x)[:, 0]))


class Gpt(nn.Module):
    """GPT-2 small: the output layer is the embedding of the words."""

    def __init__(
        self, width: int = 768, depth: int = 12, heads: int = 12, length: int = 1024, words: int = 50257
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.words.weight)


class Trained(nn.Module):
    """A model with its samples and its loss."""

    samples: Tensor
    targets: Tensor

    def __init__(self, model: nn.Module, samples: Tensor, targets: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("samples", samples, persistent=False)
        self.register_buffer("targets", targets, persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        output, target = self.model(self.samples[numbers]), self.targets[numbers]
        return F.cross_entropy(output.flatten(0, -2).float(), target.flatten())


@dataclass(frozen=True)
class Shape:
    """A model to time.

    Attributes:
        parameters: in millions, as published.
        batch: samples of a step.
        bare: makes the model alone.
        samples: makes a model complete.
        tiny: makes a complete one that a CPU can train.
        optimizer: class and arguments.
    """

    name: str
    parameters: float
    batch: int
    bare: Callable[[], nn.Module]
    samples: Callable[[nn.Module], Trained]
    tiny: Callable[[], Trained]
    optimizer: tuple[str, dict[str, object]]


def of_images(model: nn.Module, size: int, classes: int, pool: int = POOL) -> Trained:
    """Return a classifier of images, with random ones."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(pool, 3, size, size, generator=draw)
    return Trained(model, images, torch.randint(classes, (pool,), generator=draw))


def of_words(model: nn.Module, length: int, words: int, pool: int = POOL) -> Trained:
    """Return a model of the next word, with random ones."""
    text = torch.randint(words, (pool, length + 1), generator=torch.Generator().manual_seed(0))
    return Trained(model, text[:, :-1].contiguous(), text[:, 1:].contiguous())


SGD: tuple[str, dict[str, object]] = ("SGD", {"momentum": 0.9})
ADAMW: tuple[str, dict[str, object]] = ("AdamW", {"fused": True})
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "resnet50", 25.6, 256,
            ResNet, lambda model: of_images(model, 224, 1000),
            lambda: of_images(ResNet(4, (1, 1), 10), 32, 10, 16),
            SGD,
        ),
        Shape(
            "vit_s", 22.1, 256,
            ViT, lambda model: of_images(model, 224, 1000),
            lambda: of_images(ViT(16, 2, 2, 32, 10), 32, 10, 16),
            ADAMW,
        ),
        Shape(
            "gpt_124m", 124.4, 16,
            Gpt, lambda model: of_words(model, 1024, 50257),
            lambda: of_words(Gpt(16, 2, 2, 16, 50), 16, 50, 16),
            ADAMW,
        ),
    )
}  # fmt: skip
