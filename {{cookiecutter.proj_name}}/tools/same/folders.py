"""The folders of two runs: what they measured and saved."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.base.errors import UserError
from common.checkpoint.file import read_checkpoint, step_of
from common.run.paths import RunPaths
from tools.runs.read import read_metrics

Rows = dict[tuple[int, str, str], float]
_NOT_STATE = ("about", "fingerprint", "format")
_SHOWN = 5  # values that differ


def compare(first: Path, second: Path) -> tuple[str, list[str]]:
    """Compare two folders. Returns what was compared, and how it differs: no lines if it does not.

    Raises:
        UserError: one of them has no measurements.
    """
    (rows, differing), (state, more) = compare_rows(first, second), compare_checkpoints(first, second)
    return f"{rows}, {state}", [*differing, *more]


def compare_rows(first: Path, second: Path) -> tuple[str, list[str]]:
    """Compare metrics.jsonl. Returns what was compared, and the values that differ."""
    a, b = measurements(first), measurements(second)
    ends = max(a)[0], max(b)[0]
    keys, what = {*a, *b}, f"up to step {min(ends)}"
    if ends[0] != ends[1]:  # at its end, the shorter run measures more than the longer one does there
        keys = {key for key in keys if key[0] < min(ends)} | (a.keys() & b.keys())
        what += f" of {max(ends)}"
    rows = {(step, event) for step, event, _ in keys}
    return f"{len(rows)} rows {what}", differences("measured values", a, b, sorted(keys))


def measurements(run: Path) -> Rows:
    """Return what a run has measured. Raises `UserError` if it has measured nothing."""
    file = RunPaths(run).metrics_file
    if not (values := values_of(read_metrics(file) if file.is_file() else [])):
        raise UserError(f"{file} has no measurements; name two folders of runs, such as experiments/default")
    return values


def values_of(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """Return the measured values by step, event and name; a step that was repeated after a resume counts once."""
    kept = [row for row in rows if row["event"] != "speed"]
    return {(row["step"], row["event"], name): value for row in kept for name, value in row["values"].items()}


def compare_checkpoints(first: Path, second: Path, skip: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """Return what was compared of the newest checkpoints of the same step, and the entries that differ.

    `skip`: beginnings of the names of entries that may differ.
    """
    a, b = checkpoints(first), checkpoints(second)
    if not (common := a.keys() & b.keys()):
        return "no checkpoints, since the runs have none of the same step", []
    step = max(common)
    before, after = (dict(leaves(read_checkpoint(files[step]))) for files in (a, b))
    tensors = sum(isinstance(value, Tensor) for value in before.values())
    what = f"{tensors} tensors and {len(before) - tensors} other entries of the checkpoints of step {step}"
    names = [name for name in {**before, **after} if not name.startswith(skip)]
    return what, differences("entries of the checkpoints", before, after, names)


def checkpoints(run: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their step."""
    folder = RunPaths(run).checkpoints
    files = sorted(folder.glob("[!adl]*.pt"))  # neither abandoned_*.pt nor damaged_*.pt
    files += folder.glob("latest.pt")  # an evaluation that was owed may have replaced it since another of its step
    return {step: file for file in files if (step := step_of(file)) >= 0}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything in a nested state, by dotted name."""
    if not isinstance(value, (Mapping, list, tuple)):
        yield name, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        if name or key not in _NOT_STATE:
            yield from leaves(item, f"{name}.{key}" if name else str(key))


def differences(what: str, a: Mapping[Any, Any], b: Mapping[Any, Any], keys: Collection[Any]) -> list[str]:
    """Return how many values differ, and the first ones; no lines if none does."""
    bad = [key for key in keys if not equal(a.get(key), b.get(key))]
    lines = [f"{len(bad)} of {len(keys)} {what} differ:"] if bad else []
    for key in bad[:_SHOWN]:
        name = key if isinstance(key, str) else "step {}: {} {}".format(*key)
        lines.append(f"  {name}: {explain(a.get(key), b.get(key))}")
    return lines + ([f"  and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else [])


def equal(a: Any, b: Any) -> bool:
    """Return whether two values have the same bits; NaN is equal to NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def explain(a: Any, b: Any) -> str:
    """Return the difference of two values, in words."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
        largest = (a.double() - b.double()).abs().max().item()
        return f"up to {largest:.3g}, in {int((a != b).sum())} of {a.numel()} numbers"
    kinds = ["none" if item is None else tuple(item.shape) if isinstance(item, Tensor) else item for item in (a, b)]
    gap = f" (difference {abs(a - b):.3g})" if isinstance(a, float) and isinstance(b, float) else ""
    return f"{kinds[0]} in A and {kinds[1]} in B{gap}"
