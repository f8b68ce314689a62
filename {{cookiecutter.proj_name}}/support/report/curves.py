"""The charts of a report."""

import re
from collections.abc import Sequence

from support.read import RunFiles
from support.report.charts import Curve, Point, chart, smooth
from support.report.page import Html, tag

RATE = re.compile(r"lr(_.*)?")
_MOST_CHARTS = 30
_SMOOTH_FROM = 60  # points of training: with fewer, there is nothing to smooth
COLOURS = 8


def series(run: RunFiles, event: str) -> dict[str, list[Point]]:
    """The values of train, speed, val or eval by name: (step, value) in the order of the steps."""
    found: dict[str, list[Point]] = {}
    for step, values in run.measured(event).items():
        for name, value in values.items():
            found.setdefault(name, []).append((step, value))
    return found


def twins(run: RunFiles) -> set[str]:
    """The loss that is equal to the sum, in a run with one loss."""
    val = run.last.get("val", run.last.get("train", {}))
    return {name for name, value in val.items() if name != "loss" and value == val.get("loss")}


def twins_of_all(runs: Sequence[RunFiles]) -> set[str]:
    """The losses that are twins in every run that has measured anything."""
    each = [twins(run) for run in runs if run.last]
    return set.intersection(*each) if each else set()


def _base(run: RunFiles, name: str) -> str:
    """The name of a value without its set (`shifted.loss`), and without `weights.`, see optim.ema.evaluate."""
    sets = {key.split(".")[2] for key in run.config if re.fullmatch(r"dataset\.(val|eval)\.[\w-]+\.type", key)}
    while name.partition(".")[0] in sets | {"weights"} and "." in name:
        name = name.partition(".")[2]
    return name


def curves(run: RunFiles) -> list[Html]:
    """A chart for each value, with training, validation and evaluation in it; then rates, gradients and speed."""
    charts: dict[str, list[Curve]] = {}
    found, same = {event: series(run, event) for event in ("train", "val", "eval", "speed")}, twins(run)
    for colour, event in enumerate(("train", "val", "eval")):
        for name, points in found[event].items():
            if name in same or (event == "train" and is_setting(name)):
                continue
            base = _base(run, name)
            drawn = charts.setdefault(base, [])
            shown = f"{event} {name.removesuffix(base)}".rstrip(" .")
            hue = colour if all(curve.colour != colour for curve in drawn) else (len(drawn) + 2) % COLOURS
            drawn += _noisy(shown, points, hue) if event == "train" else _plain(shown, points, hue, event)
    best = run.best
    mark = {_base(run, best["metric"]): (best["step"], best["value"])} if best else {}
    order = sorted(charts, key=lambda name: (name not in mark, name != "loss", name.endswith("loss")))
    drawn_charts = [chart(name, charts[name], mark.get(name)) for name in order]
    rates = {name: points for name, points in found["train"].items() if RATE.fullmatch(name)}
    lines = [Curve(name.removeprefix("lr_"), rates[name], at % COLOURS) for at, name in enumerate(rates)]
    drawn_charts.append(chart("learning rate", lines, log=False))
    drawn_charts.append(chart("gradient norm", _noisy("train", found["train"].get("grad_norm", []), 4)))
    speed = Curve("training", found["speed"].get("samples_per_second", []), 6)
    drawn_charts.append(chart("samples per second", [speed], log=False))
    return _at_most([each for each in drawn_charts if each])


def is_setting(name: str) -> bool:
    """Whether a value of training is no result: a learning rate, or the norm of the gradients."""
    return name == "grad_norm" or RATE.fullmatch(name) is not None


def _noisy(name: str, points: list[Point], colour: int) -> list[Curve]:
    """The points, behind a smooth curve if there are many."""
    if len(points) < _SMOOTH_FROM:
        return [Curve(name, points, colour)]
    return [Curve(name, points, colour, "faint"), Curve(f"{name}, smooth", smooth(points), colour)]


def _plain(name: str, points: list[Point], colour: int, event: str) -> list[Curve]:
    return [Curve(name, points, colour, "dots" if event == "eval" else "line")]


def curves_of_all(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Html]:
    """A chart for each value of each split, with a curve for each run; of training, smooth ones."""
    found, same = [], twins_of_all(runs)
    for event in ("val", "train", "eval"):
        measured = [series(run, event) for run in runs]
        values = [name for name in dict.fromkeys(name for each in measured for name in each) if name not in same]
        for value in sorted(values, key=lambda name: (is_setting(name), name != "loss")):
            is_rate = event == "train" and RATE.fullmatch(value) is not None
            lines = []
            for at, (each, name) in enumerate(zip(measured, names, strict=True)):
                points = each.get(value, [])
                shown = smooth(points) if event == "train" and not is_rate else points
                lines += _plain(name, shown, at % COLOURS, event)
            title = value.replace("lr", "learning rate", 1) if is_rate else f"{event} {value.replace('_', ' ')}"
            found.append(chart(title, lines, log=not is_rate))
    return _at_most([each for each in found if each])


def _at_most(charts: list[Html]) -> list[Html]:
    if len(charts) <= _MOST_CHARTS:
        return charts
    more = f"{len(charts) - _MOST_CHARTS} more curves are in metrics.jsonl."
    return [*charts[:_MOST_CHARTS], tag("p", more, class_="about")]
