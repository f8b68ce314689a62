"""What several runs have in common and what not: the keys that differ, and the better one.

Imports no PyTorch, so that a table of runs appears at once.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.base.errors import UserError
from common.base.text import number
from common.config.problem import ABSENT, join_names, shown_path
from common.config.source import read_file
from common.run.paths import PROJECT, RunPaths
from tools.runs.read import RunFiles, leaves, read_run

# Keys that are different in every run, or say nothing about it.
_NOT_COMPARED = re.compile(r"name|resume|allow_changes|dir\..*")
# Which samples a run validates on; its other keys say how they are read.
_DATA = re.compile(r"dataset\.val\.(?!(.*\.)?(eval_batch_size|size|transforms)$).*|debug\.max_samples")
_RANKED = "Only runs with the same best.metric, computed alike on the same validation data, are ranked together."
_DEPTH = 4  # folders below the one that is searched


def find_runs(folder: Path) -> list[RunFiles]:
    """Find the run in a folder, or the runs anywhere below it, in the order of their paths. Raises `UserError`."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
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
    val = run.measured("val")
    evaluation = run.measured("eval")
    step = run.best["step"] if run.best else max(val, default=-1)
    found = {f"val.{name}": value for name, value in val.get(step, {}).items()}
    last = evaluation.get(max(evaluation, default=-1), {})
    return found | {f"eval.{name}": value for name, value in last.items()}


def mode(run: RunFiles) -> str:
    """Return whether the lower ("min") or the higher ("max") value of the metric in `best` is better."""
    if run.config.get("best.mode") in ("min", "max"):
        return str(run.config["best.mode"])
    metric = run.config.get("best.metric", "loss")
    if run.best:  # of all values, the best one is the lowest or the highest
        values = [row[metric] for row in run.measured("val").values() if metric in row]
        above = sum(value > run.best["value"] for value in values)
        below = sum(value < run.best["value"] for value in values)
        if above != below:  # not one value, nor two that are almost equal
            return "min" if above > below else "max"
    if "loss" in metric.split("."):
        return "min"
    from common.config import resolve  # imports PyTorch
    from custom.config import Config

    with suppress(UserError):  # it has been trained by other code
        return resolve(Config, [RunPaths(run.path).config_file]).config.best_mode
    return "max"


def definition(run: RunFiles) -> str:
    """Return what `best` is a value of, as text: its metric, and all settings that decide what this computes.

    These are which samples are validated, and the section of the metric, or of the part of the loss: without its
    weight, since parts are logged without. What is neither, such as the loss, is computed by the task, of everything.
    Image sizes and transforms are ignored: they only prepare the same data differently.
    """
    metric = str(run.config.get("best.metric", "loss"))
    configured = {key.split(".")[1] for key in run.config if key.startswith(("loss.", "metric."))}
    part = next((word for word in metric.split(".") if word in configured), None)
    beginnings = ("loss.", "task.") if part is None else (f"loss.{part}.", f"metric.{part}.")
    words = [metric]
    for key, value in run.config.items():
        is_used = key.startswith(beginnings) and not key.startswith(f"loss.{part}.weight")
        if is_used or (value and _DATA.fullmatch(key)):
            words.append(f"{key} {to_text(value)}")
    return ", ".join(words)


def rank_runs(runs: Iterable[RunFiles]) -> list[list[RunFiles]]:
    """Return the runs that have a best validation in groups whose values are comparable; in each, the best first."""
    groups: dict[str, list[RunFiles]] = {}
    for run in runs:
        if run.best:
            groups.setdefault(definition(run), []).append(run)
    for group in groups.values():
        group.sort(key=lambda run: run.best["value"] if run.best else 0, reverse=mode(group[0]) == "max")
    return list(groups.values())


def conclusion(ranked: list[list[RunFiles]]) -> list[str]:
    """Return for each group which run is best, and the command that evaluates it, in lines."""
    lines = [_RANKED] if len(ranked) > 1 else []
    for group in ranked:
        run, best = group[0], group[0].best
        assert best is not None
        among = f" of {join_names([run.name for run in group], 5)}" if len(ranked) > 1 else ""
        value = number(best["value"]).strip()
        lines.append(f"best by {best['metric']}{among}: {run.name}, {value} at step {best['step']}")
        file = RunPaths(run.path).checkpoints / "best.pt"
        if file.is_file():
            lines.append(f"  python evaluate.py --model_pt {shlex.quote(shown_path(file))}")
    return lines


def differing(runs: Sequence[RunFiles]) -> list[str]:
    """Return the keys whose values differ among the runs, in the order of the config.

    A run that lacks a key, since its model has other arguments or its code was older, counts as equal to runs that have
    the default.
    """
    usual: dict[str, Any] = {}
    with suppress(OSError, UserError):
        usual = leaves(read_file(PROJECT / "configs" / "default.yaml"))
    readable = [run.config for run in runs if run.config]
    keys = dict.fromkeys(key for config in readable for key in config if not _NOT_COMPARED.fullmatch(key))
    columns = {key: [config.get(key, usual.get(key, ABSENT)) for config in readable] for key in keys}
    return [key for key, values in columns.items() if any(value != values[0] for value in values)]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return a short name for each dotted key: as many of its last words as it takes to tell it from the others."""
    names = {}
    for key in keys:
        words = key.split(".")
        tails = (".".join(words[at:]) for at in reversed(range(len(words))))
        unlike = (tail for tail in tails if sum(f".{other}".endswith(f".{tail}") for other in keys) == 1)
        names[key] = next(unlike, key)
    return names


def to_text(value: Any) -> str:
    """Return a value of a config in a few characters."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    return ",".join(map(to_text, value)) if isinstance(value, list) else str(value)
