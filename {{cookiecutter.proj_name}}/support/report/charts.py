"""Curves as SVG: axes with round ticks, a legend, the best step marked, no more points than can be seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from support.report.page import Html, round_number, tag

Point = tuple[float, float]
Kind = Literal["line", "faint", "dots"]

_WIDTH, _HEIGHT = 560, 300  # of a chart, in its own units; it is scaled to the page
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 22, 12, 44
_MOST_POINTS = 500  # drawn of a curve: more would not be visible on a screen
_LOG_FROM = 50.0  # times the lowest value: a higher one makes the axis logarithmic


@dataclass(frozen=True)
class Curve:
    """A curve of a chart.

    Attributes:
        points: (step, value); values may be NaN or infinite, and are left out then.
        colour: number of a colour of the page, from 0.
        kind: faint for raw values behind a smooth curve; dots for values that are few.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    kind: Kind = "line"


def smooth(points: Sequence[Point]) -> list[Point]:
    """An exponential moving average over about a fiftieth of the points, without the bias of its start.

    Few points stay as they are: an average over several of them would come too late.
    """
    keep = max(0.0, 1 - 50 / max(1, len(points)))
    total = weight = 0.0
    found = []
    for step, value in points:
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
            found.append((step, total / weight))
    return found


def chart(title: str, curves: Sequence[Curve], best: Point | None = None, *, log: bool = True) -> Html:
    """A figure with axes, ticks, a legend and the curves. Empty if no curve has two finite values.

    Args:
        best: a point to mark.
        log: use a logarithmic axis if the values span a large range.
    """
    curves = [Curve(c.name, [p for p in c.points if math.isfinite(p[1])], c.colour, c.kind) for c in curves]
    curves = [curve for curve in curves if curve.points]
    if max((len(curve.points) for curve in curves), default=0) < 2:
        return Html("")
    values = [y for curve in curves for _, y in curve.points]
    is_log = log and min(values) > 0 and max(values) / min(values) >= _LOG_FROM
    steps = [x for curve in curves for x, _ in curve.points]
    x_axis = _Axis(min(0, *steps), max(steps), _LEFT, _WIDTH - _RIGHT)
    y_axis = _Axis(min(values), max(values), _HEIGHT - _BOTTOM, _TOP, is_log=is_log)
    parts = [*_grid(x_axis, y_axis), *(_drawn(curve, x_axis, y_axis) for curve in curves)]
    if best is not None and math.isfinite(best[1]):
        parts += _mark(best, x_axis, y_axis)
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    picture = tag("svg", *parts, viewBox=box, role="img", aria_label=f"{title} by step")
    legend = [tag("li", curve.name, class_=f"c{curve.colour} {curve.kind}") for curve in curves]
    if best is not None:
        legend.append(tag("li", f"best, step {best[0]:,.0f}", class_="best"))
    scale = tag("small", " log scale") if is_log else None
    return tag("figure", tag("figcaption", title, scale), tag("ul", *legend, class_="legend"), picture)


class _Axis:
    """Maps values to places between two ends of the picture."""

    def __init__(self, low: float, high: float, start: float, end: float, *, is_log: bool = False) -> None:
        self._is_log, self._start, self._end = is_log, start, end
        if is_log:
            low, high = math.log10(low), math.log10(high)
        room = (high - low) * 0.04 if start > end else 0.0  # above and below the curves
        self._low, self._high = low - room, high + room
        if self._high - self._low <= 1e-12 * max(1.0, abs(self._high)):  # one value only
            self._low, self._high = self._low - (abs(self._low) or 1) / 2, self._high + (abs(self._high) or 1) / 2

    def place(self, value: float) -> float:
        value = math.log10(value) if self._is_log else value
        return self._start + (value - self._low) / (self._high - self._low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Three to seven round values."""
        if self._is_log:
            decades = range(math.floor(self._low), math.ceil(self._high) + 1)
            factors = (1, 2, 5) if self._high - self._low < 2 else (1,)
            every = max(1, round(len(decades) / 6))
            found = [factor * 10.0**decade for decade in decades[::every] for factor in factors]
            return [value for value in found if self._low <= math.log10(value) <= self._high]
        rough = (self._high - self._low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first, last = math.ceil(self._low / size - 1e-9), math.floor(self._high / size + 1e-9)
        return [round(at * size, 12 - math.floor(math.log10(size))) for at in range(first, last + 1)]


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[Html]:
    parts = []
    for value in y_axis.ticks():
        y = round(y_axis.place(value), 1)
        parts.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", _count(value), x=_LEFT - 8, y=y + 4, text_anchor="end"))
    for value in x_axis.ticks():
        x = round(x_axis.place(value), 1)
        parts.append(tag("line", x1=x, x2=x, y1=_HEIGHT - _BOTTOM, y2=_HEIGHT - _BOTTOM + 4, class_="axis"))
        parts.append(tag("text", _count(value), x=x, y=_HEIGHT - _BOTTOM + 18, text_anchor="middle"))
    bottom = _HEIGHT - _BOTTOM
    parts.append(tag("text", "step", x=_WIDTH - _RIGHT, y=_HEIGHT - 6, text_anchor="end"))
    return [*parts, tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=bottom, y2=bottom, class_="axis")]


def _count(value: float) -> str:
    """The label of a tick: 1500 as 1.5k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / size:.4g}{letter}"
    return round_number(value)


def _drawn(curve: Curve, x_axis: _Axis, y_axis: _Axis) -> Html:
    points = [(x_axis.place(x), y_axis.place(y)) for x, y in thinned(curve.points)]
    class_ = f"c{curve.colour} {curve.kind}"
    line = tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)
    if curve.kind == "faint" or len(points) > 60:
        return line
    dots = []
    for (step, value), (x, y) in zip(thinned(curve.points), points, strict=True):
        hint = tag("title", f"{curve.name} {value:.6g} at step {step:,.0f}")
        dots.append(Html(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 if len(points) <= 30 else 2}">{hint}</circle>'))
    return tag("g", line, *dots, class_=class_)


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """At most `most` of the points: of each stretch of steps the lowest and the highest, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    size = len(points) / (most // 2 - 1)
    kept = {0, len(points) - 1}
    for part_number in range(most // 2 - 1):
        part = range(int(part_number * size), int((part_number + 1) * size))
        kept |= {min(part, key=lambda at: points[at][1]), max(part, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


def _mark(best: Point, x_axis: _Axis, y_axis: _Axis) -> list[Html]:
    x, y = round(x_axis.place(best[0]), 1), round(y_axis.place(best[1]), 1)
    label = tag("title", f"best: {best[1]:.6g} at step {best[0]:,.0f}")
    ring = Html(f'<circle cx="{x}" cy="{y}" r="5" class="best">{label}</circle>')
    return [tag("line", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM, class_="best"), ring]
