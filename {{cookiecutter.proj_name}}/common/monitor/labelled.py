"""Pictures with a frame and a text."""

import math
import unicodedata

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageDraw, ImageFont, ImageOps

from common.monitor.pictures import Picture, to_rgb

_RIGHT, _WRONG, _NEUTRAL = (46, 160, 67), (218, 54, 51), (110, 118, 129)
_PAPER, _INK = (255, 255, 255), (31, 35, 40)
_FRAME, _PAD, _FONT_SIZE = 4, 5, 16  # pixels
_SMALLEST = 112  # pixels: the shorter side an image is enlarged to when no scale is given


def draw_labelled(
    image: ArrayLike, text: str, ok: bool | None = None, scale: int | None = None, name: str = ""
) -> Picture:
    """Draw `image` enlarged, in a green (`ok`), red (not `ok`) or grey (None) frame, with `text` below it.

    Args:
        image: as in `to_rgb`.
        text: one or more lines. Characters outside ASCII become plain or ?.
        scale: how many times to enlarge it; None: until the shorter side has at least `_SMALLEST` pixels.
    """
    pixels = to_rgb(image)
    scale = scale or max(1, math.ceil(_SMALLEST / min(pixels.shape[:2])))
    colour = _NEUTRAL if ok is None else _RIGHT if ok else _WRONG
    # Nearest neighbour: a pixel of the data stays one square.
    body = ImageOps.scale(Image.fromarray(pixels), scale, Image.Resampling.NEAREST)
    body = ImageOps.expand(body, _FRAME, fill=colour)
    letters = (char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    text = "".join(letters).encode("ascii", "replace").decode()
    font = ImageFont.load_default(_FONT_SIZE)
    left, _, right, _ = ImageDraw.Draw(body).multiline_textbbox((0, 0), text, font=font)
    # Full line height whatever the letters, so images of one size with one line of text give pictures of one height.
    below = (text.count("\n") + 1) * round(_FONT_SIZE * 1.4) + 2 * _PAD if text else 0
    canvas = Image.new("RGB", (max(body.width, math.ceil(right - left) + 2 * _PAD), body.height + below), _PAPER)
    canvas.paste(body, ((canvas.width - body.width) // 2, 0))
    at, ink = (canvas.width / 2, body.height + _PAD), _INK if ok is None else colour
    ImageDraw.Draw(canvas).multiline_text(at, text, fill=ink, font=font, anchor="ma", align="center")
    return Picture(name, np.asarray(canvas))
