"""What several runs have in common and what not: the keys that differ, and the better one.

Imports no PyTorch, so that a table of runs appears at once.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.base.errors import UserError
from common.base.text import number
from common.config.problem import ABSENT, join_names, shown_path
from common.run.paths import RunPaths
from tools.runs.read import RunFiles, read_run

# Keys that are different in every run, or say nothing about it.
_NOT_COMPARED = re.compile(r"name|resume|allow_changes|dir\..*")
# Which samples a run validates on; its other keys say how they are read.
_DATA = re.compile(r"dataset\.val\.(?!(.*\.)?(eval_batch_size|size|transforms)$).*|debug\.max_samples")
_RANKED = "Only runs with the same best.metric, computed alike on the same validation data, are ranked together."


def find_runs(folder: Path) -> list[RunFiles]:
    """Find the run in a folder, or the runs anywhere below it, in the order of their paths. Raises `UserError`."""
    paths = RunPaths(folder)
    found = set()
    for file in (paths.record_file, paths.status_file, paths.metrics_file):
        found |= {path.parent for path in folder.rglob(file.name)}
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


def mode(run: RunFiles) -> str:
    """Return whether the lower ("min") or the higher ("max") value of the metric in `best` is better."""
    declared = str(run.config.get("best.mode"))
    if declared in ("min", "max"):
        return declared
    metric = run.config.get("best.metric", "loss")
    if run.best is not None:  # of all values, the best one is the lowest or the highest
        best = run.best["value"]
        values = [row[metric] for row in run.measured("val").values() if metric in row]
        above = sum(value > best for value in values)
        below = sum(value < best for value in values)
        if above > below:
            return "min"
        if below > above:
            return "max"
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
    beginnings = ("loss.", "task.")
    weight = "no weight"
    for part in metric.split("."):
        if part in configured:
            beginnings = (f"loss.{part}.", f"metric.{part}.")
            weight = f"loss.{part}.weight"
            break
    words = [metric]
    for key, value in run.config.items():
        is_used = key.startswith(beginnings) and not key.startswith(weight)
        if is_used or (value and _DATA.fullmatch(key)):
            words.append(f"{key} {to_text(value)}")
    return ", ".join(words)


def rank_runs(runs: Iterable[RunFiles]) -> list[list[RunFiles]]:
    """Return the runs that have a best validation in groups whose values are comparable; in each, the best first."""
    groups: dict[str, list[tuple[float, RunFiles]]] = {}
    for run in runs:
        if run.best is not None:
            groups.setdefault(definition(run), []).append((run.best["value"], run))
    ranked = []
    for group in groups.values():
        is_max = mode(group[0][1]) == "max"
        group.sort(key=lambda each: each[0], reverse=is_max)
        ranked.append([run for _, run in group])
    return ranked


def conclusion(ranked: list[list[RunFiles]]) -> list[str]:
    """Return for each group which run is best, and the command that evaluates it, in lines."""
    if not ranked:
        return ["No run has a best validation yet."]
    lines = []
    if len(ranked) > 1:
        lines.append(_RANKED)
    for group in ranked:
        run = group[0]
        assert run.best is not None
        among = ""
        if len(ranked) > 1:
            among = f" of {join_names([each.name for each in group], 5)}"
        value = number(run.best["value"]).strip()
        lines.append(f"best by {run.best['metric']}{among}: {run.name}, {value} at step {run.best['step']}")
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
