"""Pictures with a frame and a text, and PNG files of them."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from common.base.files import atomic_file
from common.monitor.result import Picture

Pixels = NDArray[np.uint8]

_COLOURS = {True: (46, 160, 67), False: (218, 54, 51), None: (110, 118, 129)}
_FRAME, _PAD, _FONT_SIZE = 4, 5, 16  # pixels
_SMALLEST = 112  # pixels: a smaller image is enlarged until its shorter side has that many


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
        array = np.nan_to_num(np.clip(array.astype(np.float64), 0, 1)) * 255
    array = np.clip(np.round(array), 0, 255).astype(np.uint8)[..., :3]
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


def draw(picture: Picture) -> Pixels:
    """Draw the image enlarged, in a green (`ok`), red (not `ok`) or grey (None) frame, with the text below it."""
    image = Image.fromarray(to_rgb(picture.image))
    scale = max(1, math.ceil(_SMALLEST / min(image.size)))
    colour = _COLOURS[picture.ok]
    # Nearest neighbour: a pixel of the data stays one square.
    body = ImageOps.scale(image, scale, Image.Resampling.NEAREST)
    body = ImageOps.expand(body, _FRAME, fill=colour)
    text = picture.text.encode("ascii", "replace").decode()  # the letters of the font
    font = ImageFont.load_default(_FONT_SIZE)
    left, _, right, _ = ImageDraw.Draw(body).multiline_textbbox((0, 0), text, font=font)
    below = 0
    if text:  # full line height whatever the letters, so that images of one size give pictures of one height
        below = (text.count("\n") + 1) * round(_FONT_SIZE * 1.4) + 2 * _PAD
    canvas = Image.new("RGB", (max(body.width, math.ceil(right - left) + 2 * _PAD), body.height + below), "white")
    canvas.paste(body, ((canvas.width - body.width) // 2, 0))
    at = (canvas.width / 2, body.height + _PAD)
    ImageDraw.Draw(canvas).multiline_text(at, text, fill=colour, font=font, anchor="ma", align="center")
    return np.asarray(canvas)


def save_png(path: Path, image: Pixels) -> None:
    """Write a PNG atomically; folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        Image.fromarray(image).save(file, "PNG")


def mosaic(images: Sequence[Pixels]) -> Pixels:
    """Return one picture (H, W, 3) of at least one, in rows from the left, each in a cell of one size."""
    columns = math.ceil(math.sqrt(1.6 * len(images)))  # a little wider than high, as a screen is
    rows = math.ceil(len(images) / columns)
    height = max(len(image) for image in images) + 10
    width = max(image.shape[1] for image in images) + 10
    paper = np.full((rows * height, columns * width, 3), 255, np.uint8)
    for number, image in enumerate(images):
        top = number // columns * height
        left = number % columns * width
        paper[top : top + image.shape[0], left : left + image.shape[1]] = image
    return paper
