"""The charts of a report."""

import re
from collections.abc import Sequence

from common.run.read import RunFiles
from custom.report.charts import Curve, Kind, Point, chart, smooth
from custom.report.page import Html, tag

RATE = re.compile(r"lr(_.*)?")
_MOST_CHARTS = 30
_SMOOTH_FROM = 60  # points of training: with fewer, there is nothing to smooth
_COLOURS = 8


def points_of(run: RunFiles, event: str, name: str) -> list[Point]:
    """The values of one name by step."""
    return [(step, values[name]) for step, values in run.measured(event).items() if name in values]


def _measured_names(run: RunFiles, event: str) -> list[str]:
    return list(dict.fromkeys(name for values in run.measured(event).values() for name in values))


def twins(run: RunFiles) -> set[str]:
    """The loss that is equal to the sum, in a run with one loss."""
    val = run.last.get("val", run.last.get("train", {}))
    return {name for name, value in val.items() if name != "loss" and value == val.get("loss")}


def _base(run: RunFiles, name: str) -> str:
    """The name of a value without its set (`shifted.loss`), and without `weights.`, see optim.ema.evaluate."""
    sets = {key.split(".")[2] for key in run.config if re.fullmatch(r"dataset\.(val|eval)\.[\w-]+\.type", key)}
    while name.partition(".")[0] in sets | {"weights"} and "." in name:
        name = name.partition(".")[2]
    return name


def curves(run: RunFiles) -> list[Html]:
    """A chart for each value, with training, validation and evaluation in it; then rates, gradients and speed."""
    charts: dict[str, list[Curve]] = {}
    for event, colour in (("train", 0), ("val", 1), ("eval", 2)):
        for name in _measured_names(run, event):
            base, points = _base(run, name), points_of(run, event, name)
            if name in twins(run) or (event == "train" and (RATE.fullmatch(name) or name == "grad_norm")):
                continue
            curves = charts.setdefault(base, [])
            shown = f"{event} {name.removesuffix(base)}".rstrip(" .")
            hue = colour if all(curve.colour != colour for curve in curves) else (len(curves) + 2) % _COLOURS
            if event == "train" and len(points) >= _SMOOTH_FROM:
                curves += [Curve(shown, points, hue, "faint"), Curve(f"{shown}, smooth", smooth(points), hue)]
            else:
                curves.append(Curve(shown, points, hue, "dots" if event == "eval" else "line"))
    best = run.best
    mark = {_base(run, best["metric"]): (best["step"], best["value"])} if best else {}
    order = sorted(charts, key=lambda name: (name not in mark, name != "loss", name.endswith("loss")))
    found = [chart(name, charts[name], mark.get(name)) for name in order]
    rates = [name for name in _measured_names(run, "train") if RATE.fullmatch(name)]
    found.append(chart("learning rate", [_rate(run, name, at) for at, name in enumerate(rates)], log=False))
    found.append(chart("gradient norm", [Curve("train", points_of(run, "train", "grad_norm"), 4)]))
    found.append(
        chart("samples per second", [Curve("training", points_of(run, "speed", "samples_per_second"), 6)], log=False)
    )
    return _at_most([each for each in found if each])


def _rate(run: RunFiles, name: str, colour: int) -> Curve:
    return Curve(name.removeprefix("lr_"), points_of(run, "train", name), colour % _COLOURS)


def curves_of_all(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Html]:
    """A chart for each value of each split, with a curve for each run; of training, smooth ones."""
    found = []
    for event in ("val", "train", "eval"):
        values = list(dict.fromkeys(name for run in runs for name in _measured_names(run, event)))
        for value in sorted(values, key=lambda name: (bool(RATE.fullmatch(name)), name != "loss")):
            if all(value in twins(run) for run in runs):
                continue
            curves = []
            for at, (run, name) in enumerate(zip(runs, names, strict=True)):
                points = points_of(run, event, value)
                is_noisy = event == "train" and not RATE.fullmatch(value)
                kind: Kind = "dots" if event == "eval" else "line"
                curves.append(Curve(name, smooth(points) if is_noisy else points, at % _COLOURS, kind))
            title = f"{event} {value}" if not RATE.fullmatch(value) else value.replace("lr", "learning rate", 1)
            found.append(chart(title, curves, log=not RATE.fullmatch(value)))
    return _at_most([each for each in found if each])


def _at_most(charts: list[Html]) -> list[Html]:
    if len(charts) <= _MOST_CHARTS:
        return charts
    more = f"{len(charts) - _MOST_CHARTS} more curves are in metrics.jsonl."
    return [*charts[:_MOST_CHARTS], tag("p", more, class_="about")]
