"""What several runs have in common and what not: their results, the better one, and the keys that differ.

Imports no PyTorch, so that a table of runs appears at once.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from common.base.errors import UserError
from common.base.text import number
from common.config import nearest
from common.config.problem import ABSENT, shown_path
from common.config.source import read_file
from common.run.paths import PROJECT, RunPaths
from tools.runs.read import RunFiles, leaves, read_run

# Keys that are different in every run, or say nothing about it.
_NOT_COMPARED = re.compile(r"name|resume|allow_changes|dir\..*")
# Which samples a run validates on; its other keys say how they are read.
_DATA = re.compile(r"dataset\.val\.(?!(.*\.)?(eval_batch_size|size|transforms)$).*|debug\.max_samples")
_RANKED = "Only runs with the same best.metric, computed alike on the same validation data, are ranked together."
_DEPTH = 4  # folders below the one that is searched
_BANNER = re.compile(r"^=+ .+ =+$", re.MULTILINE)  # in train.log, between two attempts
_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", re.MULTILINE)


def find_runs(folder: Path) -> list[RunFiles]:
    """Find the run in a folder, or the runs anywhere below it, in the order of their paths. Raises `UserError`."""
    if not folder.is_dir():
        near = nearest(folder.name, [path.name for path in folder.parent.glob("*") if path.is_dir()])
        raise UserError(f"there is no folder {folder}{f'; did you mean {folder.with_name(near)}?' if near else ''}")
    runs = [read_run(path) for path in sorted(_run_folders(folder, _DEPTH))]
    if not runs:
        raise UserError(f"there are no runs in {folder}: a run is a folder with status.json or metrics.jsonl")
    return runs


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    paths = RunPaths(folder)
    if any(file.is_file() for file in (paths.record_file, paths.status_file, paths.metrics_file)):
        yield folder
    elif depth:
        with os.scandir(folder) as entries:
            inner = [Path(item.path) for item in entries if item.is_dir() and not item.name.startswith(".")]
        for path in inner:
            yield from _run_folders(path, depth - 1)


def results(run: RunFiles) -> dict[str, float]:
    """`val.NAME` of the best validation, or the last one if none was the best; `eval.NAME` of the last evaluation."""
    val, evaluation = run.measured("val"), run.measured("eval")
    step = run.best["step"] if run.best else max(val, default=-1)
    measured = {"val": val.get(step, {}), "eval": evaluation.get(max(evaluation, default=-1), {})}
    return {f"{split}.{name}": value for split, values in measured.items() for name, value in values.items()}


def twins(runs: Sequence[RunFiles]) -> set[str]:
    """Return the losses equal to the sum in each run that has measured anything, as in runs with a single loss."""
    last = [run.last.get("val", run.last.get("train", {})) for run in runs if run.last]
    equal = [{name for name, value in row.items() if name != "loss" and value == row.get("loss")} for row in last]
    return set.intersection(*equal) if equal else set()


def evaluations(run: RunFiles) -> dict[str, dict[str, float]]:
    """Return the values that evaluate.py has written to the run's eval folder, by name of the checkpoint and split."""
    results = {}
    for file in sorted(RunPaths(run.path).eval.glob("*/metrics.json")):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            if "checkpoint" in (about := json.loads(file.read_text())):
                values = {name: float(value) for name, value in about["values"].items()}
                results[f"evaluate.py, {file.parent.name}"] = values
    return results


def epoch(run: RunFiles) -> float:
    """Return the epoch of the last measurement."""
    return max((row["epoch"] for row in run.records if "epoch" in row), default=0)


def durations(run: RunFiles) -> list[float]:
    """Seconds of each attempt, from the times in train.log."""
    try:
        parts = _BANNER.split(RunPaths(run.path).log_file().read_text(errors="replace"))
    except OSError:
        return []
    times = [[datetime.fromisoformat(time) for time in _TIME.findall(part)] for part in parts]
    return [(span[-1] - span[0]).total_seconds() for span in times if span]


def seconds(run: RunFiles) -> float:
    """Duration of all attempts together."""
    return sum(durations(run))


def device_hours(run: RunFiles) -> float:
    """Hours of all attempts, each times its processes: every one has a device of its own."""
    sizes = [attempt.get("world_size", 1) for attempt in run.attempts] or [1]
    return sum(time * sizes[min(at, len(sizes) - 1)] for at, time in enumerate(durations(run))) / 3600


def speed(run: RunFiles) -> dict[str, float]:
    """Return the medians over the log lines: samples and items per second, TFLOP/s and MFU, where known."""
    columns: dict[str, list[float]] = {}
    for row in run.measured("speed").values():
        for name in (name for name in row if name.endswith("_per_second") or name in ("tflops", "mfu")):
            columns.setdefault(name, []).append(row[name])
    return {name: median(values) for name, values in columns.items()}


def mode(run: RunFiles, name: str = "") -> str:
    """Return whether the lower ("min") or the higher ("max") of two values of a loss or metric is better.

    Args:
        name: by default the metric that the best checkpoint is chosen by.
    """
    metric = run.config.get("best.metric", "loss")
    if not name or name == metric:
        if (given := run.config.get("best.mode")) in ("min", "max"):
            return str(given)
        values = [row[metric] for row in run.measured("val").values() if metric in row]
        # Of all values, the best one is the lowest or the highest; but two that are almost equal can be in any order.
        gaps = sum((value > run.best["value"]) - (value < run.best["value"]) for value in values) if run.best else 0
        if gaps:
            return "min" if gaps > 0 else "max"
    return _mode_by_class(run, name or metric)


def _mode_by_class(run: RunFiles, name: str) -> str:
    parts = name.split(".")
    if "loss" in parts or any(key.split(".")[1] in parts for key in run.config if key.startswith("loss.")):
        return "min"
    from common.evaluation.best import metric_directions  # imports PyTorch
    import custom  # noqa: F401 - says where the classes are

    metrics = {key.split(".")[1] for key in run.config if key.startswith("metric.")}
    kinds = {metric: {"type": run.config.get(f"metric.{metric}.type", metric)} for metric in metrics}
    for metric, better in metric_directions(kinds).items():
        if metric in parts:
            says = better if not isinstance(better, dict) else better.get(name.partition(f"{metric}.")[2])
            return "min" if says is False else "max"
    return "max"


def ranking(run: RunFiles) -> tuple[str, str, str]:
    """Return what a run is ranked by: its metric, its validation data as text, and how the metric is computed.

    Runs are compared if all three agree. Image sizes and transforms are ignored: they only prepare the same data
    differently.
    """
    keys = [key for key in run.config if run.config[key] and _DATA.fullmatch(key)]
    keys.sort(key=lambda key: key.startswith("debug."))
    words = [f"{key.removeprefix('dataset.val.')} {to_text(run.config[key])}".removeprefix("type ") for key in keys]
    metric = str(run.config.get("best.metric", "loss"))
    return metric, ", ".join(words), definition(run, metric)


def definition(run: RunFiles, name: str) -> str:
    """Return the settings that decide what a value of a validation is: of its metric, or of its loss, as text.

    Values by one name are only comparable if they have one definition. A part of the loss is logged without its weight;
    what is neither a metric nor a part of the loss is computed by the task, of everything.
    """
    configured = {key.split(".")[1] for key in run.config if key.startswith(("loss.", "metric."))}
    part = next((part for part in name.split(".") if part in configured), None)
    if part is None:
        keys = [key for key in run.config if key.partition(".")[0] in ("loss", "task")]
    else:
        keys = [key for key in run.config if key.startswith((f"loss.{part}.", f"metric.{part}."))]
        keys = [key for key in keys if not key.startswith(f"loss.{part}.weight")]
    return ", ".join(f"{key} {to_text(run.config[key])}" for key in keys)


def rank_runs(runs: Iterable[RunFiles]) -> dict[tuple[str, str, str], list[RunFiles]]:
    """Return the runs that have a best validation by what they are ranked by, see `ranking`; the best first."""
    groups: dict[tuple[str, str, str], list[tuple[float, RunFiles]]] = {}
    for run in runs:
        if run.best:
            value = run.best["value"] * (-1 if mode(run) == "max" else 1)
            groups.setdefault(ranking(run), []).append((value, run))
    return {what: [run for _, run in sorted(group, key=lambda pair: pair[0])] for what, group in groups.items()}


def conclusion(runs: Sequence[RunFiles], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return for each metric and validation data which run is best, by what, and the command that evaluates it."""
    lines, groups = [], rank_runs(runs)
    for (metric, data, definition), (run, *_) in groups.items():
        best, file = run.best or {}, RunPaths(run.path).checkpoints / "best.pt"
        by = f"{metric} on {data}" if len({key[1] for key in groups}) > 1 else metric
        if len({key[2] for key in groups if key[0] == metric}) > 1:
            by += f" ({definition})"
        name = names[[other is run for other in runs].index(True)]
        text = f"best by {by}: {name}, {number(best['value']).strip()} at step {best['step']}"
        command = f"python evaluate.py --model_pt {shlex.quote(shown_path(file))}" if file.is_file() else ""
        lines.append((text if command else f"{text}; its best.pt is gone", command))
    if len(lines) > 1:
        lines.insert(0, (_RANKED, ""))
    return lines


def is_failed_start(run: RunFiles) -> bool:
    """Return whether a run failed before its first step, and saved nothing."""
    return run.state == "failed" and run.step == 0 and not any(RunPaths(run.path).checkpoints.glob("*"))


def defaults() -> dict[str, Any]:
    """configs/default.yaml by dotted key; empty if it cannot be read."""
    with suppress(OSError, UserError):
        return leaves(read_file(PROJECT / "configs" / "default.yaml"))
    return {}


def differing(runs: Sequence[RunFiles]) -> list[str]:
    """Return the keys whose values differ among the runs, in the order of the config.

    A run that lacks a key, since its model has other arguments or its code was older, counts as equal to runs that have
    the default.
    """
    usual, readable = defaults(), [run.config for run in runs if run.config]
    keys = dict.fromkeys(key for config in readable for key in config if not _NOT_COMPARED.fullmatch(key))
    columns = {key: [config.get(key, usual.get(key, ABSENT)) for config in readable] for key in keys}
    return [key for key, values in columns.items() if any(value != values[0] for value in values)]


def find_changes(run: RunFiles) -> list[tuple[str, Any, Any]]:
    """Return each key of the run that differs from configs/default.yaml: key, value there, value of the run.

    A section of another `type` has other keys, which are ABSENT there; a key that the run lacks is left out.
    """
    usual = defaults()
    return [
        (key, usual.get(key, ABSENT), value)
        for key, value in run.config.items()
        if not _NOT_COMPARED.fullmatch(key) and usual.get(key, ABSENT) != value
    ]


def to_text(value: Any) -> str:
    """Return a number, text or list in a few characters; of what is ABSENT, a dash."""
    if value is ABSENT or value is None or isinstance(value, bool):
        return "–" if value is ABSENT else "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    return ",".join(map(to_text, value)) if isinstance(value, list) else str(value)


def duration(number: float) -> str:
    """Seconds as 9 s, 3:05 min or 1:02:03 h."""
    minutes, rest = divmod(round(number), 60)
    hours = f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"
    return hours if minutes >= 60 else f"{minutes}:{rest:02} min" if minutes else f"{rest} s"
