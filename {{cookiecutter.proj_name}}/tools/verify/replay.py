"""Choose which part of a run to replay, and train it again in a temporary folder."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.base.errors import UserError
from common.base.files import PROJECT, write_text
from common.checkpoint.file import read_checkpoint
from common.checkpoint.resume import MEASURING, SAFE, changes, compare
from common.config import dump, resolve
from common.config.problem import join_names
from common.run.paths import RunPaths
from common.run.record import read_attempts
from tools.record.run import run_program
from tools.runs.read import is_held, read_metrics
from tools.same.folders import leaves, values_of
from custom.config import Config

_WITHOUT_EFFECT = tuple({*SAFE} - {*MEASURING, "plugins"})
_SIGTERM, _STOPPED = 15, 143  # the replay stops as by this signal, and exits with this code

Rows = Sequence[Mapping[str, Any]]
State = Mapping[str, Any]


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
    start: State
    end: State
    rows: Rows
    attempt: Mapping[str, Any]


def read_segment(paths: RunPaths, name: str | None) -> Segment:
    """Choose what to replay: to the newest checkpoint, from the oldest one since which nothing changed at a resume.

    Args:
        name: of another start.

    Raises:
        UserError: there is no such start, or the run is in use.
    """
    attempts = read_attempts(paths)
    if not attempts:
        raise UserError(f"{paths.root} is not the folder of a run, such as experiments/default")
    if is_held(paths.lock_file):
        raise UserError(f"{paths.root} is in use by {paths.lock_file.read_text()}; verify the run when that has ended")
    kept = read_kept(paths)
    last = max(kept)
    _, end = kept.pop(last)
    if end["owed"]:
        raise UserError(f"a signal interrupted the evaluation at step {last}; resume the run, then verify it")
    config = resolve(Config, [paths.root / attempts[0]["config"]]).values
    starts = {file.name: (step, state) for step, (file, state) in sorted(kept.items())}
    starts["start"] = 0, {"about": {"config": config}, "fingerprint": {}}
    hindrances = {start: hindrance(step, state, end) for start, (step, state) in starts.items()}
    if name is None:
        name = next((start for start, text in hindrances.items() if not text), None)
        if name is None:
            raise UserError(f"the run has no single replay: {next(iter(hindrances.values()))}")
    name = Path(name).name
    if name not in starts:
        raise UserError(f"--from {name}: choose one of {', '.join(starts)}")
    if hindrances[name]:
        raise UserError(f"--from {name}: {hindrances[name]}")
    first, state = starts[name]
    rows = [row for row in read_metrics(paths.metrics_file) if (first or -1) < row["step"] <= last]  # 0: before step 1
    return Segment(paths, name, first, last, state, end, rows, attempts[-1])


def read_kept(paths: RunPaths) -> dict[int, tuple[Path, State]]:
    """Read the checkpoints by step. Raises `UserError` if there is none."""
    kept: dict[int, tuple[Path, State]] = {}
    files = paths.checkpoints.glob("[!ad]*.pt")  # neither abandoned_*.pt nor damaged_*.pt
    for file in sorted(files, key=lambda file: (file.name == "latest.pt", file)):  # latest.pt replaces its equals
        state = read_checkpoint(file)
        kept[state["position"]["step"]] = file, state
    if not kept:
        raise UserError(f"{paths.checkpoints} has no checkpoint to replay to")
    return kept


def hindrance(step: int, start: State, end: State) -> str:
    """Return why one replay from this state cannot repeat the run; "" if nothing is known."""
    rewinds = start["about"]["config"]["optim"].get("bad_steps", {}).get("action") == "rewind"
    if rewinds and start.get("bad_steps", {}).get("anchor", 0) not in (0, step):
        return "its run would rewind to an earlier checkpoint, which a replay lacks: --from start"
    settings = changes(config_in(start), config_in(end))
    names = [str(change) for change in settings if not change.matches(_WITHOUT_EFFECT)]
    found = compare({**end["fingerprint"], **start["fingerprint"]}, end["fingerprint"])
    names += found.samples + found.bits
    return f"changed at a resume: {join_names(names)}" if names else ""


def replay(segment: Segment, folder: Path) -> tuple[Rows, State]:
    """Train the segment again in `folder`, with as many processes and threads.

    Returns the lines of its metrics.jsonl, and its newest checkpoint. Raises `UserError` with the last lines of its
    output if it fails.
    """
    file = folder / "config.yaml"
    output = folder / "output.txt"
    write_text(file, dump(replay_config(segment, folder)))
    print(f"replays steps {segment.first + 1} to {segment.last}; log: {output}", flush=True)
    saves = [str(row["step"]) for row in segment.rows if row["event"] == "checkpoint"]
    variables = {**segment.attempt["environment"], "OMP_NUM_THREADS": str(segment.attempt["machine"]["threads"])}
    command = [sys.executable, str(PROJECT / "train.py"), "--config", str(file)]
    run_program(command, output, codes=(0, _STOPPED), VERIFY_SAVES=",".join(saves), **variables)
    paths = RunPaths(folder / "replay")
    return read_metrics(paths.metrics_file), read_checkpoint(paths.checkpoints / "latest.pt")


def config_in(state: State) -> dict[str, Any]:
    """Return the config in the state of a run, complete."""
    return resolve(Config, [], stored=state["about"]["config"]).values


def replay_config(segment: Segment, folder: Path) -> dict[str, Any]:
    """Return the config of the replay in `folder`: the run's own, with as many processes."""
    values = config_in(segment.start)
    if segment.first:
        values |= {"resume": str(segment.paths.checkpoints / segment.name), "allow_changes": True}
    elif segment.paths.contains(values["resume"]):
        values["resume"] = None
    ranks = segment.end["fingerprint"]["ranks"]
    on_cpu = segment.attempt["machine"]["device"].startswith("cpu") or not torch.accelerator.is_available()
    if on_cpu or ranks > 1:
        values["gpu_ids"] = -1 if on_cpu else list(range(ranks))
    values["dist"] |= {"random_seed": segment.end["about"]["seed"], "launcher": "auto", "processes": ranks}
    values["dir"]["runs_dir"] = str(folder)
    values["monitor"]["writers"] = []
    return values | {"name": "replay", "plugins": [*values["plugins"], "tools.verify.replay.stop_at_end"]}


def stop_at_end(trainer: Any) -> None:
    """Save at the steps in VERIFY_SAVES, and stop after the last of them. A plugin of the replay."""
    saves = [int(step) for step in os.environ["VERIFY_SAVES"].split(",")]
    sync = trainer.stop_signals.sync

    def decide(save: bool) -> Any:
        decision = sync(save)
        step = trainer.at.step
        stop = _SIGTERM if step >= max(saves) else decision.stop
        return decision._replace(save=step in saves or decision.save, stop=stop)

    trainer.stop_signals.sync = decide  # the loop calls it after the evaluations of a step, on every process


def recorded(rows: Rows, state: State) -> dict[str, dict[Any, Any]]:
    """Return what a run recorded, by kind and name."""
    return {
        "measurements": values_of(rows),
        "entries of the newest checkpoint": dict(leaves(state)),
    }
