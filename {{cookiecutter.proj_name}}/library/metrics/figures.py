"""Pictures that metrics draw: a matrix of counts, and curves within the unit square."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.config.registry import needs
from common.monitor.fonts import font_for, legible

needs("matplotlib")  # imported below, in a run that draws: 0.5 s
MOST_CURVES = 10  # colours
_LONGEST = 16  # characters of a class name


def class_label(classes: Sequence[str], number: int) -> str:
    """Return the name of a class, shortened; its number if it has no name, or no font can draw it."""
    name = legible(classes[number], number) if number < len(classes) else str(number)
    return name if len(name) <= _LONGEST else name[: _LONGEST - 3] + "..."


def draw_matrix(counts: Sequence[Sequence[int]], classes: Sequence[str], rows: str, columns: str) -> NDArray[np.uint8]:
    """Draw counts as a table, (H, W, 3): a cell is as dark as its share of the row. Large tables have no text.

    Args:
        counts: rows of equal length, at least one.
        rows: what the rows are, such as "label".
        columns: what the columns are.
    """
    table, size = np.asarray(counts), len(counts)
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    figure = _figure(figsize=(min(2 + 0.45 * size, 11),) * 2)
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel=columns, ylabel=rows)
    names = [class_label(classes, number) for number in range(size)] if size <= 60 else []
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    _show(axes.get_xticklabels(), names)
    _show(axes.get_yticklabels(), names)
    for y, x in zip(*table.nonzero(), strict=True) if size <= 20 else ():
        axes.text(x, y, str(table[y, x]), ha="center", va="center", color="white" if shares[y, x] > 0.5 else "black")
    return _pixels(figure)


def draw_curves(curves: Mapping[str, tuple[NDArray[Any], NDArray[Any]]], x_name: str, y_name: str) -> NDArray[np.uint8]:
    """Draw the first ten curves, arrays x and y in 0..1 by name, with a legend. Returns (H, W, 3)."""
    figure = _figure(figsize=(8, 5))
    axes = figure.subplots()
    lines = [axes.plot(*points)[0] for points in list(curves.values())[:MOST_CURVES]]
    axes.set(xlabel=x_name, ylabel=y_name, xlim=(0, 1), ylim=(0, 1.01), aspect="equal")
    axes.grid(alpha=0.4)
    names = list(curves)[:MOST_CURVES]
    _show(figure.legend(lines, ["x" * len(name) for name in names], loc="outside right upper").get_texts(), names)
    return _pixels(figure)


def _figure(figsize: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    # No pyplot, which keeps figures and needs a backend for the whole process.
    return Figure(figsize=figsize, layout="constrained")


def _show(texts: Iterable[Any], names: Iterable[str]) -> None:
    """Write names literally: no formulas between dollars, and with a font that has their characters."""
    from matplotlib.font_manager import FontProperties

    for text, name in zip(texts, names, strict=True):
        text.set(text=name, parse_math=False)
        if isinstance(file := getattr(font_for(name, 10), "path", None), str):
            text.set_fontproperties(FontProperties(fname=file, size=text.get_fontsize()))


def _pixels(figure: Any) -> NDArray[np.uint8]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
