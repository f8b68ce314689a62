"""RandAugment (Cubuk et al., NeurIPS 2020): a few random operations, all of one strength.

For images of three channels and usual sizes, torchvision.transforms.v2.RandAugment has more of them.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Operation = Callable[[Tensor, float], Tensor]
"""Of an image (C, H, W), float in 0..1, and a strength, -1..1."""


def rand_augment(image: Tensor, operations: int = 2, magnitude: float = 9.0, spread: float = 0.5) -> Tensor:
    """Apply `operations` random ones, one after the other.

    Args:
        image: (C, H, W), float in 0..1.
        operations: how many.
        magnitude: strength, 0..10.
        spread: standard deviation of the strength.
    """
    for number in torch.randint(len(OPERATIONS), (operations,)).tolist():
        strength = min(max(magnitude + spread * float(torch.randn(())), 0.0), 10.0) / 10
        sign = 1 if torch.rand(()) < 0.5 else -1
        image = OPERATIONS[number](image, sign * strength)
    return image


def moved(image: Tensor, matrix: list[list[float]]) -> Tensor:
    """Return the image after an affine map, (2, 3), of places in -1..1; what comes from outside is 0."""
    grid = F.affine_grid(torch.tensor([matrix]), [1, *image.shape], align_corners=False)
    return F.grid_sample(image[None], grid.to(image), align_corners=False)[0]


def rotate(image: Tensor, strength: float) -> Tensor:
    """Turn it by up to 30 degrees."""
    angle = torch.tensor(strength * torch.pi / 6)
    sine, cosine = float(angle.sin()), float(angle.cos())
    return moved(image, [[cosine, -sine, 0.0], [sine, cosine, 0.0]])


def blend(image: Tensor, other: Tensor, strength: float) -> Tensor:
    """Move it away from another image, by up to 0.9 of the difference, or towards it."""
    return (other + (1 + 0.9 * strength) * (image - other)).clamp(0, 1)


def posterize(image: Tensor, strength: float) -> Tensor:
    """Keep few grey levels: 16 down to 3."""
    levels = 15 - round(13 * abs(strength))
    return (image * levels).round() / levels


def solarize(image: Tensor, strength: float) -> Tensor:
    """Invert what is brighter than a bound."""
    return torch.where(image > 1 - abs(strength) / 2, 1 - image, image)


def autocontrast(image: Tensor, strength: float) -> Tensor:
    """Stretch the values to 0..1, whatever the strength."""
    low, high = image.amin(), image.amax()
    return (image - low) / (high - low).clamp(min=1e-6)


OPERATIONS: list[Operation] = [
    lambda image, strength: image,
    rotate,
    lambda image, strength: moved(image, [[1.0, 0.3 * strength, 0.0], [0.0, 1.0, 0.0]]),  # shear
    lambda image, strength: moved(image, [[1.0, 0.0, 0.0], [0.3 * strength, 1.0, 0.0]]),
    lambda image, strength: moved(image, [[1.0, 0.0, 0.4 * strength], [0.0, 1.0, 0.0]]),  # shift
    lambda image, strength: moved(image, [[1.0, 0.0, 0.0], [0.0, 1.0, 0.4 * strength]]),
    lambda image, strength: blend(image, torch.zeros_like(image), strength),  # brightness
    lambda image, strength: blend(image, image.mean(), strength),  # contrast
    lambda image, strength: blend(image, F.avg_pool2d(image, 3, stride=1, padding=1), strength),  # sharpness
    posterize,
    solarize,
    autocontrast,
]
