"""Read what a run left on the disk, choose which part of it to replay, and name what has changed since."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.base.errors import UserError
from common.build import build_parts
from common.checkpoint.checksum import weights_digest
from common.checkpoint.file import read_checkpoint
from common.checkpoint.fingerprint import changes, fingerprint
from common.checkpoint.guarantee import MEASURING, SAFE
from common.config import resolve
from common.config.names import join_names
from common.data.reading import compare_data, read_data
from common.data.workers import OtherProcess, context_of
from common.distributed.process import set_up_process
from common.run.environment import versions_of
from common.run.lock import is_held
from common.run.metrics import read_metrics
from common.run.paths import RunPaths
from common.run.record import read_attempts
from cli.trained import config_in, find_device
from tools.verify.around import RECORD, changed_samples
from custom.config import Config

_WITHOUT_EFFECT = tuple({*SAFE} - {*MEASURING, "plugins"})
_PACKAGES = ("packages", "python", "torch", "numpy", "libraries")  # names in a fingerprint


@dataclass(frozen=True)
class Segment:
    """The part of a run that is replayed.

    Attributes:
        name: of the checkpoint that it begins with, or `start`.
        first, last: the steps of its ends.
        start, end: the states there; of the beginning of the run, the config alone.
        rows: lines of metrics.jsonl about the steps in between.
        attempt: the entry of the last start in run.json.
    """

    paths: RunPaths
    name: str
    first: int
    last: int
    start: Mapping[str, Any]
    end: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    attempt: Mapping[str, Any]


def read_segment(paths: RunPaths, name: str | None) -> Segment:
    """Choose what to replay: to the newest checkpoint, from the oldest one since which nothing changed at a resume.

    Args:
        name: of another start.

    Raises:
        UserError: there is no such start, the run is in use, or a checkpoint is not what was saved.
    """
    if not (attempts := read_attempts(paths)):
        raise UserError(f"{paths.root} is not the folder of a run, such as experiments/default")
    if is_held(paths.lock_file):
        raise UserError(f"{paths.root} is in use by {paths.lock_file.read_text()}; verify the run when that has ended")
    rows = read_metrics(paths.metrics_file)
    kept = read_kept(paths, {row["step"]: row["weights"] for row in rows if "weights" in row})
    last = max(kept)
    end = kept.pop(last)[1]
    if end["owed"]:
        raise UserError(f"a signal interrupted the evaluation at step {last}; resume the run, then verify it")
    config = resolve(Config, [paths.root / attempts[0]["config"]]).values
    starts = {file.name: (step, state) for step, (file, state) in sorted(kept.items())}
    starts["start"] = 0, {"about": {"config": config}, "fingerprint": {}}
    if name is None:
        possible = [start for start, (step, state) in starts.items() if not lacks_anchor(step, state)]
        unchanged = [start for start in possible if not changed_at_resume(starts[start][1], end)]
        name = next(iter(unchanged or possible))
    if (name := Path(name).name) not in starts:
        raise UserError(f"--from {name}: choose one of {', '.join(starts)}")
    first, start = starts[name]
    if lacks_anchor(first, start):
        raise UserError(
            f"--from {name}: its run would rewind to an earlier checkpoint, which a replay lacks: --from start"
        )
    rows = [row for row in rows if (first or -1) < row["step"] <= last]  # 0: evaluations before the first step
    return Segment(paths, name, first, last, start, end, rows, attempts[-1])


def read_kept(paths: RunPaths, recorded: Mapping[int, str]) -> dict[int, tuple[Path, dict[str, Any]]]:
    """Read the checkpoints by step. Raises `UserError` if there is none, or the weights are not as `recorded`."""
    kept = {}
    files = sorted(paths.checkpoints.glob("[!ad]*.pt"))  # neither abandoned_*.pt nor damaged_*.pt
    for file in sorted(files, key=lambda file: file.name == "latest.pt"):  # it replaces an older one of its step
        state = read_checkpoint(file)
        step = state["position"]["step"]
        if weights_digest(state) != recorded.get(step):
            raise UserError(f"{file} does not hold the weights that metrics.jsonl recorded when step {step} was saved")
        kept[step] = file, state
    if not kept:
        raise UserError(f"{paths.checkpoints} has no checkpoint to replay to")
    return kept


def lacks_anchor(step: int, state: Mapping[str, Any]) -> bool:
    """Return whether a run that starts from this state could rewind to a checkpoint before it (`optim.bad_steps`)."""
    rewinds = state["about"]["config"]["optim"].get("bad_steps", {}).get("action") == "rewind"
    return rewinds and state.get("bad_steps", {}).get("anchor", 0) not in (0, step)


def changed_at_resume(start: Mapping[str, Any], end: Mapping[str, Any]) -> list[str]:
    """Return what decides the bits and differs between two states of a run, so that one replay cannot repeat it."""
    settings = changes(config_in(start).values, config_in(end).values)
    old, new = {**end["fingerprint"], **start["fingerprint"]}, end["fingerprint"]
    others = changes({**old, "data": None}, {**new, "data": None})
    decisive = [*(change for change in settings if not change.matches(_WITHOUT_EFFECT)), *others]
    data = [compare_data(name, old["data"].get(name, {}), now) for name, now in new["data"].items()]
    causes = [change.arrow for change in decisive] + [reason for kind, reason, _ in data if kind == "other"]
    return [f"at a resume: {text}" for text in causes]


def compare_causes(segment: Segment, config: Config) -> dict[str, list[str]]:
    """Compare what decides the bits with what the run recorded. Takes over its environment, for the replay too.

    Returns:
        `changed`: code, packages and data, by name; `another machine`: what of it is different; `not compared`.

    Raises:
        UserError: a part of the run cannot be built, such as a dataset whose files are missing.
    """
    old, seed, attempt = segment.end["fingerprint"], segment.end["about"]["seed"], segment.attempt
    os.environ.update(attempt["environment"], OMP_NUM_THREADS=str(attempt["cpu_threads"]))
    torch.set_num_threads(attempt["cpu_threads"])
    rank = find_device(config.gpu_ids, asked=False)
    set_up_process(config.dist, rank)
    parts = build_parts(config, rank, seed)
    loaders = parts.deciding_data()
    records = {name: reading.record() for name, reading in read_data(loaders).items()}
    new = fingerprint(rank, parts.stream, seed, "", records)
    installed = versions_of(old["packages"])
    new["packages"] = {**old["packages"], **installed}
    changed, machine = changed_at_resume(segment.start, segment.end), []
    missing = [f"package {name}" for name in old["packages"] if name not in installed]
    keys = ("code", *_PACKAGES, "environment", *attempt["machine"])
    for change in changes({key: old[key] for key in keys}, {key: new.get(key) for key in keys}):
        kind, _, name = change.key.partition(".")
        if kind == "code":
            changed.append(f"{name}; see git diff {attempt['git']['commit']} -- {name}")
        elif kind in _PACKAGES:
            changed.append(f"package {change.arrow.removeprefix('packages.')}")
        else:
            machine.append(change.arrow)
    file = segment.paths.root / RECORD
    record = dict(np.load(file)) if file.is_file() else {}
    for name, loader in loaders.items():
        kind, reason, _ = compare_data(name, old["data"][name], records[name])
        if kind in ("missing", "varies"):
            missing.append(reason)
        elif name in record:
            reader = OtherProcess(context_of(loader._loader), changed_samples, record[name], loader.batches)
            if items := reader.result():
                kind, reason = "other", f"dataset.{name}: {join_names(items)}"
        if kind == "other":
            changed.append(reason)
        if left := records[name]["size"] - len(record.get(name, ())):
            missing.append(f"dataset.{name}: {left:,} samples")
    return {"another machine": machine, "not compared": missing, "changed": changed}
