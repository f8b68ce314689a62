"""Writers of curves and pictures. Every file named `*_writer.py` below this folder is imported at the first look-up."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.registry import WRITER_REGISTRY

WRITER_REGISTRY.scan(__name__, "_writer")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config as one dict with dotted keys: `{"optim.lr": 0.001}`. Lists stay as they are."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


def mosaic(images: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """One picture (H, W, 3) of at least one, in rows from the left, each in the middle of a cell of one size."""
    if len(images) == 1:
        return images[0]
    columns = math.ceil(math.sqrt(1.6 * len(images)))  # a little wider than high, as a screen is
    rows, gap = -(-len(images) // columns), 10
    height, width = (max(image.shape[side] for image in images) + gap for side in (0, 1))
    paper = np.full((rows * height, columns * width, 3), 255, np.uint8)
    for number, image in enumerate(images):
        top = number // columns * height + (height - image.shape[0]) // 2
        left = number % columns * width + (width - image.shape[1]) // 2
        paper[top : top + image.shape[0], left : left + image.shape[1]] = image
    return paper
