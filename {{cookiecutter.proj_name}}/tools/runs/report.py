"""The report of a run, report.html: one page that needs no other file, to read in a browser, to send and to print.

Everything in it comes from the files of the run; its layout is in page.html.jinja.
"""

import base64
import math
import re
import shlex
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader
from loguru import logger

from common.base.files import write_text
from common.base.text import number
from common.config.show import dump
from common.run.paths import RunPaths
from tools.runs import compare
from tools.runs.read import RunFiles, read_run

FILE = "report.html"
_HERE = Path(__file__).parent
_COLOURS = 8
_MOST_POINTS = 500  # drawn of a curve: more would not be visible on a screen
_MOST_PICTURES = 16  # of a heading
_MOST_BYTES = 1_000_000  # of a picture: a larger one stays in the run's folder
_SMOOTH_FROM = 60  # points of training: with fewer, there is nothing to smooth
_LOG_FROM = 50.0  # times the lowest value: a higher one makes the axis logarithmic
_RATE = re.compile(r"lr(_.*)?")
_SETTING = re.compile(r"grad_norm|lr(_.*)?")  # a value of training that is no result
_WARNING = re.compile(r"^\d{4}-\d\d-\d\d \S+ (?:WARNING|ERROR|CRITICAL) .*", re.MULTILINE)

Point = tuple[float, float]


def write_report(folder: Path) -> None:
    """Write the report of a run into its folder. A failure is a warning: the run has ended well."""
    try:
        write_text(folder / FILE, report(read_run(folder)))
    except Exception as error:  # noqa: BLE001 - any error
        again = shlex.join(["python", "-m", "tools.report", str(folder)])
        logger.warning("{} cannot be written: {!r}; try {}", folder / FILE, error, again)


def report(run: RunFiles) -> str:
    """Return the page of a run."""
    pages = Environment(loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {"number": lambda value: number(value).strip(), "tick": _tick, "shown": compare.to_text}
    parts = (attempts, cards, charts, environment, names_of, pictures, results, warnings)
    pages.globals |= {part.__name__: part for part in parts} | {"compare": compare, "dump": dump}
    return pages.get_template("page.html.jinja").render(run=run)


def cards(run: RunFiles) -> Iterator[tuple[str, float, str]]:
    """Yield the numbers that are asked for first, each as (name, value, note): the best validation leads."""
    best, same = run.best, compare.twins([run])
    if best:
        yield f"best val {best['metric']}", best["value"], f"step {best['step']:,}"
    notes = {"val": f"at step {best['step']:,}" if best else "last validation", "eval": "last evaluation"}
    for name, value in sorted(compare.results(run).items(), key=lambda item: item[0].endswith(".loss")):
        split, _, metric = name.partition(".")
        if metric not in same and not (best and name == f"val.{best['metric']}"):
            yield f"{split} {metric}", value, notes[split]
    if train := smooth(series(run, "train").get("loss", [])):
        yield "train loss", train[-1][1], "at the end"


def results(run: RunFiles) -> dict[str, Mapping[str, float]]:
    """Columns of values: last of training, best and last of validation, last of evaluation, those of evaluate.py.

    A loss that equals the sum, as a single one does, is there once.
    """
    train = {name: value for name, value in run.last.get("train", {}).items() if not _SETTING.fullmatch(name)}
    columns: dict[str, Mapping[str, float]] = {"train, last": train}
    if run.best:
        columns[f"val, best (step {run.best['step']:,})"] = run.measured("val")[run.best["step"]]
    for event in ("val", "eval"):
        columns[f"{event}, last (step {max(run.measured(event), default=0):,})"] = run.last.get(event, {})
    same, columns = compare.twins([run]), columns | compare.evaluations(run)
    return {name: {key: values[key] for key in values if key not in same} for name, values in columns.items() if values}


def names_of(columns: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the names of all values."""
    return list(dict.fromkeys(name for values in columns.values() for name in values))


def attempts(run: RunFiles) -> Iterator[dict[str, Any]]:
    """Yield each start or resume, as in run.json: its number, the step that it resumed from, and a short command."""
    resumed = {row.get("attempt"): row.get("resume_step") for row in run.records if row["event"] == "run"}
    for count, attempt in enumerate(run.attempts, 1):
        words = [str(word) for word in attempt.get("argv", [])]
        command = " ".join(["python", Path(words[0]).name, *words[1:]]) if words else str(attempt.get("command"))
        step = resumed.get(attempt.get("attempt", count))
        start = "the beginning" if step is None else f"step {step:,}"
        yield {**attempt, "number": count, "start": start, "short_command": command}


def environment(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Code, versions and machine of an attempt, as far as they are known."""
    about = {**attempt.get("git", {}), **attempt.get("versions", {}), **attempt.get("environment", {})}
    about |= {name: attempt.get(name) for name in ("host", "cpu_threads", "seed", "command", "working_directory")}
    return {name.replace("_", " "): value for name, value in about.items() if value is not None}


def warnings(run: RunFiles) -> list[str]:
    """Return the lines of warnings and errors in train.log."""
    file = RunPaths(run.path).log_file()
    return _WARNING.findall(file.read_text(errors="replace")) if file.is_file() else []


def pictures(run: RunFiles) -> dict[str, list[tuple[str, str, int]]]:
    """Pictures as (name, address, width) by heading: of the last evaluation, the latest of each split's progress."""
    paths = RunPaths(run.path)
    evaluations = [folder for folder in paths.eval.glob("*/") if any(folder.rglob("*.png"))]
    last = max(evaluations, key=lambda folder: (folder.stat().st_mtime, folder.name), default=None)
    groups = {f"eval/{last.name}": sorted(last.rglob("*.png"))} if last else {}
    for split in sorted(paths.progress.glob("*/")):
        newest = {file.parent: file for file in sorted(split.rglob("*.png"))}  # the steps of a folder are in order
        if not (split.name == "eval" and last):  # they are those of the eval folder
            groups[f"progress/{split.name}"] = list(newest.values())
    drawn = {}
    for heading, files in groups.items():
        shown = [picture for picture in map(_picture, files[:_MOST_PICTURES]) if picture]
        if shown:
            drawn[heading] = shown
    return drawn


def _picture(file: Path) -> tuple[str, str, int] | None:
    """None for a picture that is damaged or too large."""
    data = file.read_bytes()
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or not 24 < len(data) <= _MOST_BYTES:
        return None
    name = f"{file.parent.name} {file.stem}" if re.fullmatch(r"epoch\d+_step\d+", file.stem) else file.stem
    return name, f"data:image/png;base64,{base64.b64encode(data).decode()}", struct.unpack(">I", data[16:20])[0]


class Curve(NamedTuple):
    """A curve of a chart: `kind` is line, faint (raw values behind a smooth curve) or dots (of few values)."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    kind: str = "line"


def series(run: RunFiles, event: str) -> dict[str, list[Point]]:
    """Return the values of train, speed, val or eval by name: (step, value) in the order of the steps."""
    points: dict[str, list[Point]] = {}
    for step, values in run.measured(event).items():
        for name, value in values.items():
            points.setdefault(name, []).append((step, value))
    return points


def charts(run: RunFiles) -> list[dict[str, Any]]:
    """Draw a chart for each value, with training, validation and evaluation in it; then rates, gradients and speed."""
    same, charts, train = compare.twins([run]), dict[str, list[Curve]](), series(run, "train")
    for colour, event in enumerate(("train", "val", "eval")):
        for name, points in series(run, event).items():
            if name not in same and not (event == "train" and _SETTING.fullmatch(name)):
                drawn = charts.setdefault(base := _base(run, name), [])
                hue = colour if all(curve.colour != colour for curve in drawn) else (len(drawn) + 2) % _COLOURS
                drawn += _curves(f"{event} {name.removesuffix(base)}".rstrip(" ."), points, hue, event)
    best = {_base(run, run.best["metric"]): (run.best["step"], run.best["value"])} if run.best else {}
    order = sorted(charts, key=lambda name: (name not in best, name != "loss", name.endswith("loss")))
    rates = [name for name in train if _RATE.fullmatch(name)]
    lines = [Curve(name.removeprefix("lr_"), train[name], at % _COLOURS) for at, name in enumerate(rates)]
    speed = {name: line for name, line in series(run, "speed").items() if name in compare.speed(run)}
    all_charts = [chart(name, charts[name], best.get(name)) for name in order]
    all_charts += [chart("learning rate", lines, log=False)]
    all_charts += [chart("gradient norm", _curves("train", train.get("grad_norm", []), 4, "train"))]
    all_charts += [chart(name.replace("_", " "), [Curve("training", speed[name], 6)], log=False) for name in speed]
    return [chart for chart in all_charts if chart]


def _base(run: RunFiles, name: str) -> str:
    """Return the name of a value without its set (`shifted.loss`), and without `weights.`, see optim.ema.evaluate."""
    sets = {key.split(".")[2] for key in run.config if re.fullmatch(r"dataset\.(val|eval)\.[\w-]+\.type", key)}
    while name.partition(".")[0] in sets | {"weights"} and "." in name:
        name = name.partition(".")[2]
    return name


def _curves(name: str, points: list[Point], colour: int, event: str) -> list[Curve]:
    """Return the points; of many points of training, those behind a smooth curve."""
    if event != "train" or len(points) < _SMOOTH_FROM:
        return [Curve(name, points, colour, "dots" if event == "eval" else "line")]
    return [Curve(name, points, colour, "faint"), Curve(f"{name}, smooth", smooth(points), colour)]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Return an exponential moving average over about a fiftieth of the points, without the bias of its start.

    Few points stay as they are: an average over several of them would come too late.
    """
    keep = max(0.0, 1 - 50 / max(1, len(points)))
    total = weight = 0.0
    kept = []
    for step, value in points:
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
            kept.append((step, total / weight))
    return kept


def thin(points: Sequence[Point]) -> list[Point]:
    """At most 500 of the points: of each stretch of steps the lowest and the highest, so that no peak is lost."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    parts = _MOST_POINTS // 2 - 1
    ends, kept = [len(points) * part // parts for part in range(parts + 1)], {0, len(points) - 1}
    for start, end in pairwise(ends):
        kept |= {choose(range(start, end), key=lambda at: points[at][1]) for choose in (min, max)}
    return [points[at] for at in sorted(kept)]


def chart(title: str, curves: Sequence[Curve], best: Point | None = None, *, log: bool = True) -> dict[str, Any] | None:
    """Return what the template draws: finite points, no more than can be seen, and the axes. None without two points.

    Args:
        best: a point to mark.
        log: use a logarithmic axis if the values span a large range.
    """
    curves = [curve._replace(points=[point for point in curve.points if math.isfinite(point[1])]) for curve in curves]
    curves = [curve for curve in curves if curve.points]
    if max((len(curve.points) for curve in curves), default=0) < 2:
        return None
    values = [value for curve in curves for _, value in curve.points]
    is_log = log and min(values) > 0 and max(values) / min(values) >= _LOG_FROM
    x = _Axis(0, max(step for curve in curves for step, _ in curve.points), 66, 538)
    y = _Axis(min(values), max(values), 256, 12, is_log=is_log)
    shown = [curve._replace(points=thin(curve.points)) for curve in curves]
    best = best if best and math.isfinite(best[1]) else None
    return {"title": title, "curves": shown, "best": best, "is_log": is_log, "x": x, "y": y}


class _Axis:
    """Maps values to places between two ends of the picture."""

    def __init__(self, low: float, high: float, start: float, end: float, *, is_log: bool = False) -> None:
        self._scale, self._start, self._end = math.log10 if is_log else float, start, end
        low, high = self._scale(low), self._scale(high)
        room = (high - low) * 0.04 * (start > end)  # above and below the curves
        if high - low <= 1e-12 * max(1.0, abs(high)):  # one value only
            room = (abs(low) or 1) / 2
        self._low, self._high, self._is_log = low - room, high + room, is_log

    def __call__(self, value: float) -> float:
        part = (self._scale(value) - self._low) / (self._high - self._low)
        return round(self._start + part * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        """Three to seven round values."""
        low, high = self._low, self._high
        if self._is_log:
            factors, every = (1, 2, 5) if high - low < 2 else (1,), max(1, round((high - low) / 6))
            decades = range(math.floor(low), math.ceil(high) + 1, every)
            ticks = [factor * 10.0**decade for decade in decades for factor in factors]
            return [value for value in ticks if low <= math.log10(value) <= high]
        rough = (high - low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        return [size * at for at in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


def _tick(value: float) -> str:
    """Return the label of a tick: 1500 as 1.5k."""
    letters = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
    size, letter = next((pair for pair in letters if pair[0] <= abs(value) < 1e12), (1, ""))
    return f"{value / size:.4g}{letter}".replace("e-0", "e-").replace("e+0", "e").replace("-", "−")
