"""Pictures of a model's results, and PNG files of them."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from common.base.files import atomic_file

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Picture:
    """A picture (H, W, 3) in RGB, and the name to save it under; "" for its index among the others."""

    name: str
    image: Pixels


def to_rgb(image: ArrayLike) -> Pixels:
    """Bring an image (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), floats to 1 or integers to 255, to (H, W, 3).

    Values outside the range are clipped; NaN becomes 0.

    Raises:
        ValueError: the shape is another one.
    """
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise ValueError(f"an image has the shape (H, W) or (H, W, 1, 3 or 4), not {np.shape(image)}")
    if not np.issubdtype(array.dtype, np.integer):
        array = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=1.0, neginf=0.0) * 255
    array = np.clip(np.round(array), 0, 255).astype(np.uint8)[..., :3]
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


def save_png(path: Path, image: ArrayLike) -> None:
    """Write a PNG atomically; folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        Image.fromarray(to_rgb(image)).save(file, "PNG")


def progress_path(root: Path, split: str, name: str, epoch: int, step: int) -> Path:
    """`<root>/<split>/<name>/epoch000003_step000120.png`; a listing has the steps in order.

    Characters that a file name may not have become `_`; it has at most 100 bytes.
    """
    folder = os.fsencode(re.sub(r"[^\w.+=-]+", "_", name).strip("._"))[:100].decode(errors="ignore")
    return root / split / folder / f"epoch{epoch:06d}_step{step:06d}.png"


def mosaic(images: Sequence[Pixels]) -> Pixels:
    """Return one picture (H, W, 3) of at least one, in rows from the left, each in the middle of a cell of one size."""
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
