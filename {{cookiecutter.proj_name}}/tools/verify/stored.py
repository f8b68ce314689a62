"""Read what a run left on the disk, choose which part of it to replay, and find what has changed since."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.base.errors import UserError
from common.build import build_parts
from common.checkpoint.checksum import weights_digest
from common.checkpoint.file import CheckpointError, read_checkpoint
from common.checkpoint.fingerprint import changes, fingerprint
from common.checkpoint.guarantee import MEASURING, SAFE
from common.config import resolve
from common.config.layers import node_of
from common.data.contents import compare_contents
from common.distributed.process import set_up_process
from common.run.environment import version_of
from common.run.lock import is_held
from common.run.metrics import read_metrics
from common.run.paths import RunPaths
from common.run.record import read_attempts
from cli.trained import find_device
from custom.config import Config

_WITHOUT_EFFECT = tuple({*SAFE} - {*MEASURING, "plugins"})
_PACKAGES = ("python", "torch", "numpy", "libraries")  # beside `packages` in a fingerprint


@dataclass(frozen=True)
class StoredRun:
    """A run as it lies on the disk.

    Attributes:
        rows: the lines of metrics.jsonl.
        recorded: the digest of the weights at each save, by step; none of an earlier version.
        kept: the intact checkpoints by step, each with the digest of its weights.
        damaged: what is wrong with the others.
    """

    paths: RunPaths
    attempts: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    recorded: dict[int, str]
    kept: dict[int, tuple[Path, str]]
    damaged: list[str]


@dataclass(frozen=True)
class Segment:
    """The part of a run that is replayed: from `start` (None: the beginning) at step `first`, to `end` at step `last`.

    Attributes:
        state: what the checkpoint `end` holds.
        attempt: the entry in run.json of the attempt that wrote it.
        mixed: what changed at a resume in between, so that one replay cannot repeat it.
    """

    start: Path | None
    first: int
    end: Path
    last: int
    state: dict[str, Any]
    attempt: dict[str, Any]
    mixed: list[str]


def read_run(paths: RunPaths) -> StoredRun:
    """Read a run and all its checkpoints. Raises `UserError` if there is nothing to verify, or it is in use."""
    if not (attempts := read_attempts(paths)) or not paths.metrics_file.is_file():
        raise UserError(f"{paths.root} is not the folder of a run, such as experiments/default: it has no run.json")
    if is_held(paths.lock_file):
        raise UserError(f"{paths.root} is in use by {paths.lock_file.read_text()}; verify the run when that has ended")
    rows = read_metrics(paths.metrics_file)
    recorded = {row["step"]: row["weights"] for row in rows if row["event"] == "checkpoint" and "weights" in row}
    run = StoredRun(paths, attempts, rows, recorded, {}, [])
    for file in sorted(paths.checkpoints.glob("*.pt"), reverse=True):  # numbered ones first: latest.pt may be the same
        if file.name.startswith("abandoned") or any(file.samefile(other) for other, _ in run.kept.values()):
            continue
        try:
            state = read_checkpoint(file)
            run.kept.setdefault(state["position"]["step"], (file, weights_digest(state)))
        except CheckpointError as error:
            run.damaged.append(str(error))
    if not run.kept:
        raise UserError("\n  ".join([f"{paths.checkpoints} has no intact checkpoint to replay to", *run.damaged]))
    return run


def choose_segment(run: StoredRun, start: str | None) -> Segment:
    """Choose what to replay: to the newest checkpoint, from the oldest one since which nothing changed at a resume.

    Args:
        start: "start", or the file of a checkpoint of the run; None: as above.

    Raises:
        UserError: there is no such checkpoint before the newest one.
    """
    last, name = max(run.kept), Path(start).name if start else None
    kept = [(step, run.kept[step][0]) for step in sorted(run.kept) if step < last]
    older: list[tuple[int, Path | None]] = [(step, file) for step, file in kept if name in (None, file.name)]
    if name not in (None, "start") and not older:
        names = [file.name for _, file in kept]
        raise UserError(f"--from {start}: choose one of {', '.join(['start', *names])}")
    end, state = run.kept[last][0], read_checkpoint(run.kept[last][0])
    resumed = {row["attempt"]: row["resume_step"] or 0 for row in run.rows if row["event"] == "run"}
    begins = [resumed.get(number, 0) for number in range(1, len(run.attempts) + 1)]
    found: list[Segment] = []
    for first, origin in older or [(0, None)]:
        spans = zip(run.attempts, begins, [*begins[1:], last + 1], strict=True)
        trained = [attempt for attempt, begin, until in spans if begin < last and until > first] or run.attempts[-1:]
        decisive = [_decisive(run, attempt) for attempt in trained]
        mixed = [f"at a resume: {each.arrow}" for one in decisive for each in changes(one, decisive[-1])]
        found.append(Segment(origin, first, end, last, state, trained[-1], mixed))
    return next((each for each in found if not each.mixed), found[-1])


def _decisive(run: StoredRun, attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the bits of an attempt, as far as run.json and its config record it."""
    values = resolve(Config, [run.paths.root / attempt["config"]]).values
    config = {each.key: str(each.old) for each in changes(values, {}) if not each.matches(_WITHOUT_EFFECT)}
    return {"config": config, **{name: attempt[name] for name in ("packages", "machine", "world_size")}}


def replay_config(run: StoredRun, segment: Segment) -> dict[str, Any]:
    """Return the config of the replay: the run's own, from where the segment starts, with as many processes."""
    if segment.start is None:
        values = resolve(Config, [run.paths.root / run.attempts[0]["config"]]).values
        values["resume"] = None if run.paths.contains(values["resume"]) else values["resume"]
    else:
        stored = node_of(dict(segment.state["about"]["config"]), f"the config in {segment.end}")
        values = resolve(Config, [], stored=stored).values | {"resume": str(segment.start), "allow_changes": True}
        values["progress"]["start_epoch"] = -1
    ranks, device = segment.state["fingerprint"]["ranks"], segment.attempt["machine"]["device"]
    on_cpu = device.startswith("cpu") or (device.startswith("cuda") and not torch.cuda.is_available())
    values["gpu_ids"] = -1 if on_cpu else list(range(ranks)) if ranks > 1 else values["gpu_ids"]
    processes = ranks if on_cpu and ranks > 1 else None
    values["dist"] |= {"random_seed": segment.state["about"]["seed"], "launcher": "auto", "processes": processes}
    values["plugins"] = [*values["plugins"], "tools.verify.replay.stop_at_end"]
    values["monitor"] |= {"writers": [], "bar": "off"}
    return values | {"name": "replay"}


def compare_evidence(run: StoredRun, segment: Segment, values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Compare what decides the bits with the record in the newest checkpoint and, for the data, in data.npz.

    Returns:
        `changed`: code, packages and data, by name; `machine`: what of it is another one; `not_compared`.

    Raises:
        UserError: a part of the run cannot be built, such as a data set whose files are missing.
    """
    old, seed = segment.state["fingerprint"], segment.state["about"]["seed"]
    os.environ.update(segment.attempt["environment"])
    config = resolve(Config, [], stored=node_of(dict(values), "the config of the replay")).config
    rank = find_device(config.gpu_ids, asked=False)
    set_up_process(config.dist, rank)
    torch.set_num_threads(segment.attempt["cpu_threads"])
    parts = build_parts(config, rank, seed)
    new = fingerprint(rank, parts.stream, seed, "", parts.deciding_data())
    new["packages"] = {name: version_of(name) for name in old.get("packages", ())}
    commit, changed, machine = segment.attempt["git"]["commit"], list(dict.fromkeys(segment.mixed)), []
    missing = [f"{key} (the run does not record it)" for key in ("code", "packages") if key not in old]
    keys = [key for key in ("code", *_PACKAGES, "packages", "environment", *segment.attempt["machine"]) if key in old]
    for change in changes({key: old[key] for key in keys}, {key: new.get(key) for key in keys}):
        kind, _, name = change.key.partition(".")
        if kind == "code":
            how = " (new)" if change.old is None else " (gone)" if change.new is None else ""
            changed.append(f"{name}{how}" + f"; see git diff {commit} -- {name}" * bool(commit and not how))
        elif kind == "packages" or kind in _PACKAGES:
            changed.append(f"package {name or kind} {change.old} -> {change.new or 'not installed'}")
        else:
            machine.append(change.arrow)
    if rank.device.type != "cpu" and not new["deterministic"]:
        machine.append("a GPU without dist.deterministic strict: results may differ each time")
    data, unread = compare_contents(run.paths.contents_file, parts.deciding_data(), old.get("data", {}), new["data"])
    return {"machine": machine, "not_compared": missing + unread, "changed": changed + data}
