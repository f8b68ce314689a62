"""The folders of two runs: what they measured and saved."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.base.errors import UserError
from common.checkpoint.file import read_checkpoint, step_of
from common.run.metrics import read_metrics
from common.run.paths import RunPaths

Rows = dict[tuple[int, str, str], float]
_NOT_STATE = ("about", "fingerprint", "format")
_SHOWN = 5  # entries of checkpoints that differ


def compare(first: Path, second: Path) -> tuple[str, list[str]]:
    """Compare two folders. Returns what was compared, and how it differs: no lines if it does not.

    Raises:
        UserError: one of them has no measurements.
    """
    (rows, differing), (state, more) = compare_rows(first, second), compare_checkpoints(first, second)
    return f"{rows}, {state}", [*differing, *more]


def compare_rows(first: Path, second: Path) -> tuple[str, list[str]]:
    """Compare metrics.jsonl. Returns what was compared, and how the first different row differs."""
    a, b = measurements(first), measurements(second)
    ends = max(a)[0], max(b)[0]
    end = min(ends)
    # At its end, the shorter run measures more than the longer one does there.
    at_end = {*a, *b} if ends[0] == ends[1] else a.keys() & b.keys()
    keys = sorted(key for key in {*a, *b} if key[0] < end or (key[0] == end and key in at_end))
    different = [key for key in keys if not equal(a.get(key), b.get(key))]
    rows, bad = {key[:2] for key in keys}, sorted({key[:2] for key in different})
    what = f"{len(rows)} rows up to step {end}"
    if ends[0] != ends[1]:
        what += f" (where {'A' if ends[0] < ends[1] else 'B'} ends; the other goes to {max(ends)})"
    lines = [f"{len(bad)} of {len(rows)} rows differ, first the {event} row of step {step}:" for step, event in bad[:1]]
    return what, lines + [f"  {key[2]}: {explain(a.get(key), b.get(key))}" for key in different if key[:2] == bad[0]]


def measurements(run: Path) -> Rows:
    """The measured values by step, event and name: those of a step that was repeated after a resume are there once."""
    if not (file := RunPaths(run).metrics_file).is_file():
        raise UserError(f"there is no {file}; name two folders of runs, such as experiments/default")
    rows = [row for row in read_metrics(file) if row["event"] != "speed"]
    found = {(row["step"], row["event"], name): value for row in rows for name, value in row["values"].items()}
    if not found:
        raise UserError(f"{file} has no measurement yet, so there is nothing to compare")
    return found


def compare_checkpoints(first: Path, second: Path) -> tuple[str, list[str]]:
    """What was compared of the newest checkpoints of the same step, and the entries that differ."""
    a, b = checkpoints(first), checkpoints(second)
    if not (common := a.keys() & b.keys()):
        return "no checkpoints, since the runs have none of the same step", []
    step = max(common)
    before, after = (dict(leaves(read_checkpoint(files[step]))) for files in (a, b))
    tensors = sum(isinstance(value, Tensor) for value in before.values())
    what = f"{tensors} tensors and {len(before) - tensors} other entries of the checkpoints of step {step}"
    names = list(dict.fromkeys([*before, *after]))
    bad = [name for name in names if not equal(before.get(name), after.get(name))]
    lines = [f"  {name}: {explain(before.get(name), after.get(name))}" for name in bad[:_SHOWN]]
    lines += [f"  and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
    return what, [f"{len(bad)} of {len(names)} entries of the checkpoints differ:", *lines] if bad else []


def checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoints of a run by their step."""
    files = [file for file in sorted(RunPaths(run).checkpoints.glob("*.pt")) if not file.name.startswith("abandoned")]
    return {step: file for file in files if (step := step_of(file)) >= 0}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a nested state, by dotted name."""
    if not isinstance(value, (Mapping, list, tuple)):
        yield name, value
        return
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        if name or key not in _NOT_STATE:
            yield from leaves(item, f"{name}.{key}" if name else str(key))


def equal(a: Any, b: Any) -> bool:
    """Whether two values have the same bits; NaN is equal to NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def explain(a: Any, b: Any) -> str:
    """The difference of two values, in words."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
        largest = (a.double() - b.double()).abs().max().item()
        return f"up to {largest:.3g}, in {int((a != b).sum())} of {a.numel()} numbers"
    kinds = ["none" if each is None else tuple(each.shape) if isinstance(each, Tensor) else each for each in (a, b)]
    gap = f" (difference {abs(a - b):.3g})" if isinstance(a, float) and isinstance(b, float) else ""
    return f"{kinds[0]} in A and {kinds[1]} in B{gap}"
