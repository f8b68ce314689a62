"""A generator of digits and the discriminator it is trained against."""

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot


class ConditionalGan(nn.Module):
    """Both parts of a conditional generative adversarial network (Mirza and Osindero 2014), each a small MLP.

    Args:
        noise: numbers that the generator starts from.
        classes: number of classes.
        width: units per hidden layer.
        size: height and width of an image.
    """

    def __init__(self, noise: int = 16, classes: int = 10, width: int = 128, size: int = 8) -> None:
        super().__init__()
        self.generator = Generator(noise, classes, width, size)
        self.discriminator = Discriminator(classes, width, size)

    def forward(self, noise: Tensor, label: Tensor) -> Tensor:
        """Images of the given classes (B, 1, size, size), 0..1."""
        return self.generator(noise, label)


class Generator(nn.Module):
    """Noise (B, noise) and classes (B,) to images (B, 1, size, size), 0..1."""

    def __init__(self, noise: int, classes: int, width: int, size: int) -> None:
        super().__init__()
        self.classes, self.size = classes, size
        self.layers = _mlp(noise + classes, width, size * size)

    def forward(self, noise: Tensor, label: Tensor) -> Tensor:
        wanted = one_hot(label, self.classes).to(noise.dtype)
        return self.layers(torch.cat([noise, wanted], dim=1)).sigmoid().view(-1, 1, self.size, self.size)


class Discriminator(nn.Module):
    """Images (B, 1, size, size) and their classes (B,) to logits (B,), positive for real images."""

    def __init__(self, classes: int, width: int, size: int) -> None:
        super().__init__()
        self.classes = classes
        self.layers = _mlp(size * size + classes, width, 1)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        wanted = one_hot(label, self.classes).to(image.dtype)
        return self.layers(torch.cat([image.flatten(1), wanted], dim=1)).squeeze(1)


def _mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    hidden = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))
