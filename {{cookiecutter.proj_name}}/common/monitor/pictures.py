"""Pictures of a model's results: labelled, framed, and saved as PNG files."""

import math
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from common.base.files import atomic_file

Pixels = NDArray[np.uint8]
_RIGHT, _WRONG, _NEUTRAL = (46, 160, 67), (218, 54, 51), (110, 118, 129)
_PAPER, _INK = (255, 255, 255), (31, 35, 40)
_FRAME, _PAD, _FONT_SIZE = 4, 5, 16  # pixels
_SMALLEST = 112  # pixels: the shorter side an image is enlarged to when no scale is given


@dataclass(frozen=True)
class Picture:
    """A picture (H, W, 3) in RGB, and the name to save it under; "" for its index among the others."""

    name: str
    image: Pixels


def to_rgb(image: ArrayLike) -> Pixels:
    """An image (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), floats from 0 to 1 or whole numbers to 255, as (H, W, 3).

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


def labelled(image: ArrayLike, text: str, ok: bool | None = None, scale: int | None = None, name: str = "") -> Picture:
    """Draw `image` enlarged, in a green (`ok`), red (not `ok`) or grey (None) frame, with `text` below it.

    Args:
        image: as in `to_rgb`.
        text: one or more lines. Pillow's own font has plain letters only: accents and other signs are left out.
        scale: how many times to enlarge it; None: until the shorter side has at least `_SMALLEST` pixels.
    """
    pixels = to_rgb(image)
    scale = scale or max(1, math.ceil(_SMALLEST / min(pixels.shape[:2])))
    colour = _NEUTRAL if ok is None else _RIGHT if ok else _WRONG
    # Nearest neighbour: a pixel of the data stays one square.
    body = ImageOps.scale(Image.fromarray(pixels), scale, Image.Resampling.NEAREST)
    body = ImageOps.expand(body, _FRAME, fill=colour)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    font = ImageFont.load_default(_FONT_SIZE)
    left, _, right, _ = ImageDraw.Draw(body).multiline_textbbox((0, 0), text, font=font)
    # Full line height whatever the letters, so images of one size with one line of text give pictures of one height.
    below = (text.count("\n") + 1) * round(_FONT_SIZE * 1.4) + 2 * _PAD if text else 0
    canvas = Image.new("RGB", (max(body.width, math.ceil(right - left) + 2 * _PAD), body.height + below), _PAPER)
    canvas.paste(body, ((canvas.width - body.width) // 2, 0))
    at, ink = (canvas.width / 2, body.height + _PAD), _INK if ok is None else colour
    ImageDraw.Draw(canvas).multiline_text(at, text, fill=ink, font=font, anchor="ma", align="center")
    return Picture(name, np.asarray(canvas))


def save_png(path: Path, image: ArrayLike) -> None:
    """Write a PNG atomically; folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        Image.fromarray(to_rgb(image)).save(file, "PNG")


def progress_path(root: Path, split: str, name: str, epoch: int, step: int) -> Path:
    """`<root>/<split>/<name>/epoch000003_step000120.png`; a listing has the steps in order.

    Characters that a file name may not have become `_`.
    """
    folder = re.sub(r"[^\w.+=-]+", "_", name).strip("._")[:100]
    return root / split / folder / f"epoch{epoch:06d}_step{step:06d}.png"
