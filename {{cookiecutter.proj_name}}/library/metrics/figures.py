"""Pictures that metrics draw: a matrix of counts, and curves within the unit square."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from common.monitor.fonts import Font, font_for, legible

_PAPER, _INK, _GRID, _FULL = (255, 255, 255), (31, 35, 40), (208, 215, 222), (9, 105, 218)
_COLOURS = (
    (9, 105, 218), (218, 54, 51), (46, 160, 67), (191, 135, 0), (130, 80, 223),
    (191, 57, 137), (27, 124, 131), (110, 118, 129), (149, 56, 0), (31, 35, 40),
)  # fmt: skip
MOST_CURVES = len(_COLOURS)
_LONGEST = 16  # characters of a class name


def class_label(classes: Sequence[str], number: int) -> str:
    """The name of a class, shortened; its number if it has none, or one that no font can draw."""
    name = legible(classes[number], number) if number < len(classes) else str(number)
    return name if len(name) <= _LONGEST else name[: _LONGEST - 3] + "..."


def draw_matrix(counts: Sequence[Sequence[int]], classes: Sequence[str], rows: str, columns: str) -> NDArray[np.uint8]:
    """Counts as a table, (H, W, 3): each cell as dark as its share of the row. Numbers only where they fit.

    Args:
        counts: rows of equal length, at least one.
        rows: what the rows are, such as "label".
        columns: what the columns are.
    """
    size = len(counts)
    cell = 44 if size <= 20 else max(1, 880 // size)
    names = [class_label(classes, number) for number in range(size)] if cell >= 12 else [""] * size
    height, title = min(14, max(cell, 1)), font_for("", 16)
    fonts = [font_for(name, height) for name in names]
    margin = 40 + max(int(font.getlength(name)) for name, font in zip(names, fonts, strict=True))
    picture = Image.new("RGB", (margin + size * cell + 12, margin + size * cell + 12), _PAPER)
    draw = ImageDraw.Draw(picture)
    table = np.asarray(counts)
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    body = np.round(_PAPER + shares[..., None] * np.subtract(_FULL, _PAPER)).astype(np.uint8)
    body = body.repeat(cell, axis=0).repeat(cell, axis=1)
    if cell >= 8:
        body[cell - 1 :: cell] = body[:, cell - 1 :: cell] = _GRID
    picture.paste(Image.fromarray(body), (margin, margin))
    draw.rectangle((margin - 1, margin - 1, margin + size * cell, margin + size * cell), outline=_GRID)
    for y, (name, font) in enumerate(zip(names, fonts, strict=True)):
        draw.text((margin - 6, margin + y * cell + cell / 2), name, fill=_INK, font=font, anchor="rm")
    for y, x in zip(*table.nonzero(), strict=True) if cell >= 30 else ():
        at, ink = (margin + (x + 0.5) * cell, margin + (y + 0.5) * cell), _PAPER if shares[y, x] > 0.5 else _INK
        draw.text(at, str(table[y, x]), fill=ink, font=font_for("", height), anchor="mm")
    middle = margin + size * cell // 2
    for x, (name, font) in enumerate(zip(names, fonts, strict=True)):
        _turned(picture, (margin - 10 + x * cell + cell // 2, margin - 6), name, font)
    draw.text((middle, 4), columns, fill=_INK, font=title, anchor="ma")
    _turned(picture, (2, middle + int(title.getlength(rows)) // 2), rows, title)
    return np.asarray(picture)


def _turned(picture: Image.Image, corner: tuple[int, int], text: str, font: Font) -> None:
    """Write a text from below to above; `corner` is its lower left end."""
    line = Image.new("RGB", (int(font.getlength(text)) + 2, 20), _PAPER)
    ImageDraw.Draw(line).text((0, 10), text, fill=_INK, font=font, anchor="lm")
    picture.paste(line.rotate(90, expand=True), (corner[0], corner[1] - line.width))


def draw_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str, size: int = 420
) -> NDArray[np.uint8]:
    """Lines through points (x, y), 0..1, with a legend, (H, W, 3). At most ten curves: the first."""
    margin, font = 52, font_for("", 14)
    legend = 40 + max((int(font_for(name, 14).getlength(name)) for name in list(curves)[:MOST_CURVES]), default=0)
    picture = Image.new("RGB", (margin + size + legend, size + margin + 16), _PAPER)
    draw = ImageDraw.Draw(picture)
    left, top = margin, 16
    for tick in range(6):
        at = size * tick / 5
        draw.line((left, top + at, left + size, top + at), fill=_GRID)
        draw.line((left + at, top, left + at, top + size), fill=_GRID)
        draw.text((left - 6, top + size - at), f"{tick / 5:.1f}", fill=_INK, font=font, anchor="rm")
        draw.text((left + at, top + size + 4), f"{tick / 5:.1f}", fill=_INK, font=font, anchor="ma")
    for number, (name, points) in enumerate(list(curves.items())[:MOST_CURVES]):
        colour, line = _COLOURS[number], [(left + size * x, top + size * (1 - y)) for x, y in points]
        draw.line(line, fill=colour, width=2)
        draw.line((left + size + 10, top + 12 + 20 * number, left + size + 26, top + 12 + 20 * number), colour, 3)
        draw.text((left + size + 32, top + 12 + 20 * number), name, fill=_INK, font=font_for(name, 14), anchor="lm")
    draw.text((left + size / 2, picture.height - 4), x_name, fill=_INK, font=font, anchor="md")
    _turned(picture, (0, top + size // 2 + int(font.getlength(y_name)) // 2), y_name, font)
    return np.asarray(picture)
