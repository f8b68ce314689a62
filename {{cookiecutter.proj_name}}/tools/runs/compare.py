"""What several runs have in common and what not: the keys that differ, and the better one.

Imports no PyTorch, so that a table of runs appears at once.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.base.errors import UserError
from common.base.text import number
from common.config.problem import ABSENT, join_names, shown_path
from common.run.paths import RunPaths
from tools.runs.read import RunFiles, read_run

# Keys that are different in every run, or say nothing about it.
_NOT_COMPARED = re.compile(r"name|resume|allow_changes|dir\..*")
# What decides which samples are validated, and what a loss or metric of them is.
_MEASURING = ("dataset.val", "debug.max_samples", "loss.", "metric.", "task.")


def find_runs(folder: Path) -> list[RunFiles]:
    """Find the run in a folder, or the runs anywhere below it, in the order of their paths. Raises `UserError`."""
    found = set()
    places = [folder, *(each for each in folder.glob("*") if each.is_symlink())]  # which rglob does not follow
    for name in ("run.json", "status.json", "metrics.jsonl"):
        for place in places:
            found |= {path.parent for path in place.rglob(name)}
    if not found:
        raise UserError(f"there are no runs in {folder}: a run is a folder with status.json or metrics.jsonl")
    return [read_run(path) for path in sorted(found)]


def results(run: RunFiles) -> dict[str, float]:
    """`val.NAME` of the best validation, or the last one if none was the best; `eval.NAME` of the last evaluation."""
    val = run.last.get("val", {})
    if run.best is not None:
        val = run.measured("val")[run.best["step"]]
    found = {}
    for split, values in (("val", val), ("eval", run.last.get("eval", {}))):
        for name, value in values.items():
            found[f"{split}.{name}"] = value
    return found


def rank_runs(runs: Iterable[RunFiles]) -> list[list[RunFiles]]:
    """Return the runs that have a best validation in groups by its metric; in each, the best run first."""
    groups: dict[str, list[tuple[float, RunFiles]]] = {}
    is_max: dict[str, bool] = {}
    for run in runs:
        if run.best is not None:
            metric = run.best["metric"]
            groups.setdefault(metric, []).append((run.best["value"], run))
            if run.best["mode"]:
                is_max[metric] = run.best["mode"] == "max"
    ranked = []
    for metric, group in groups.items():
        if metric not in is_max:  # runs of earlier versions do not record it
            continue
        group.sort(key=lambda each: each[0], reverse=is_max[metric])
        ranked.append([run for _, run in group])
    return ranked


def conclusion(ranked: list[list[RunFiles]], keys: Sequence[str]) -> list[str]:
    """Return in lines which run is best by each metric, and the command that evaluates it.

    Args:
        keys: those whose values differ among the runs.
    """
    if not ranked:
        return ["No run records which validation is its best, and whether more or less is better."]
    lines = []
    measuring = [key for key in keys if key.startswith(_MEASURING)]
    if measuring:
        lines.append(f"Compare only runs that measure alike: these differ in {join_names(measuring, 5)}.")
    for group in ranked:
        run = group[0]
        assert run.best is not None
        value = number(run.best["value"]).strip()
        lines.append(f"best by {run.best['metric']}: {run.name}, {value} at step {run.best['step']}")
        file = RunPaths(run.path).checkpoints / "best.pt"
        if file.is_file():
            lines.append(f"  python evaluate.py --model_pt {shlex.quote(shown_path(file))}")
    return lines


def differing(runs: Sequence[RunFiles]) -> list[str]:
    """Return the keys whose values differ among the runs, in the order of the config."""
    readable = [run.config for run in runs if run.config]
    found = []
    for key in dict.fromkeys(key for config in readable for key in config):
        values = [config.get(key, ABSENT) for config in readable]
        if not _NOT_COMPARED.fullmatch(key) and any(value != values[0] for value in values):
            found.append(key)
    return found


def to_text(value: Any) -> str:
    """Return a value of a config in a few characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ",".join(map(to_text, value))
    return str(value)
