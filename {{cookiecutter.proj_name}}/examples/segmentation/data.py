"""Images of shapes with a class for every pixel, drawn by formula."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from examples.digits import SPLITS

IGNORED = 255  # class of pixels on an edge, as in the PASCAL VOC data: not trained on, not counted
CLASSES = ("background", "disc", "square", "triangle")


class Shapes:
    """Two shapes of random kind, size, place and brightness on a noisy background. Sample i is a function of i.

    Args:
        samples: number of images.
        size: height and width of an image, in pixels.
        noise: standard deviation of the noise; brightness is about 0..1.
    """

    random = False  # items draw from generators of their own, so the loader need not seed

    def __init__(self, data_dir: Path, mode: str, samples: int = 1024, size: int = 24, noise: float = 0.1) -> None:
        self.split, self.samples, self.size, self.noise = SPLITS.index(mode), samples, size, noise

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`image` (1, H, W), float around 0..1, and `mask` (H, W), int64: an index of `CLASSES`, or `IGNORED`."""
        draw = np.random.default_rng([self.split, index])
        image = np.full((self.size, self.size), draw.uniform(0.2, 0.8))
        mask = np.zeros((self.size, self.size), dtype=np.int64)
        for kind in draw.integers(1, len(CLASSES), size=2):
            inside = _inside(int(kind), draw, self.size)
            image[inside], mask[inside] = draw.choice([-0.1, 1.1]) * draw.uniform(0.8, 1.0), kind
        image += draw.normal(scale=self.noise, size=image.shape)
        mask[_on_an_edge(mask)] = IGNORED
        return {"image": torch.from_numpy(image).float()[None], "mask": torch.from_numpy(mask)}


def _inside(kind: int, draw: np.random.Generator, size: int) -> NDArray[np.bool_]:
    """Return the pixels of one shape wholly inside the image, a third to half as wide."""
    half = draw.uniform(size / 6, size / 4)
    y, x = np.mgrid[:size, :size] - draw.uniform(half, size - 1 - half, size=2)[:, None, None]
    if CLASSES[kind] == "disc":
        return x**2 + y**2 <= half**2
    if CLASSES[kind] == "square":
        return np.maximum(abs(x), abs(y)) <= 0.85 * half
    return (abs(y) <= half) & (2 * abs(x) <= y + half)


def _on_an_edge(mask: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Pixels with another class to their right or below."""
    edge = np.zeros(mask.shape, dtype=bool)
    edge[:, :-1] |= mask[:, :-1] != mask[:, 1:]
    edge[:-1] |= mask[:-1] != mask[1:]
    return edge
