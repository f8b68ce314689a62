"""Train a part of a run again in a temporary folder, and compare what both recorded."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from common.base.files import PROJECT
from common.checkpoint.file import read_checkpoint
from common.config import dump
from common.run.metrics import read_metrics
from common.run.paths import RunPaths
from cli.trained import config_in
from tools.record.run import run_program
from tools.same.folders import leaves, values_of
from tools.verify.stored import Segment

_SIGTERM, _STOPPED = 15, 143  # the replay stops as by this signal, and exits with this code

Records = dict[str, dict[Any, Any]]


def replay_config(segment: Segment, folder: Path) -> dict[str, Any]:
    """Return the config of the replay in `folder`: the run's own, with as many processes."""
    values, device = config_in(segment.start).values, segment.attempt["machine"]["device"]
    if segment.first:
        values |= {"resume": str(segment.paths.checkpoints / segment.name), "allow_changes": True}
        values["progress"] |= {"start_epoch": -1}
    elif segment.paths.contains(values["resume"]):
        values["resume"] = None
    ranks, on_cpu = (
        segment.end["fingerprint"]["ranks"],
        device.startswith("cpu") or not torch.accelerator.is_available(),
    )
    if on_cpu or ranks > 1:
        values["gpu_ids"] = -1 if on_cpu else list(range(ranks))
    values["dist"] |= {"random_seed": segment.end["about"]["seed"], "launcher": "auto", "processes": ranks}
    values["dir"] |= {"runs_dir": str(folder)}
    values["monitor"] |= {"writers": [], "bar": "off"}
    return values | {"name": "replay", "plugins": [*values["plugins"], "tools.verify.replay.stop_at_end"]}


def replay(segment: Segment, config: Mapping[str, Any], folder: Path) -> Records:
    """Train the segment again in `folder`. Raises `UserError` with the last lines of its output if that fails."""
    file, output, paths = folder / "config.yaml", folder / "output.txt", RunPaths(folder / "replay")
    file.write_text(dump(config))
    speeds = [row["values"]["step_seconds"] for row in segment.rows if row["event"] == "speed"]
    seconds = sum(speeds) / max(1, len(speeds)) * (segment.last - segment.first)
    text = f"replays steps {segment.first + 1} to {segment.last}: about {seconds:.0f} s, and its start and evaluations"
    print(f"{text}; log: {output}", flush=True)
    saves = [str(row["step"]) for row in segment.rows if "weights" in row]
    command = [sys.executable, str(PROJECT / "train.py"), "--config", str(file)]
    run_program(command, output, codes=(0, _STOPPED), VERIFY_SAVES=",".join(saves))
    return recorded(read_metrics(paths.metrics_file), read_checkpoint(paths.checkpoints / "latest.pt"))


def stop_at_end(trainer: Any) -> None:
    """Save at the steps in VERIFY_SAVES, and stop after the last of them. A plugin of the replay."""
    saves = [int(step) for step in os.environ["VERIFY_SAVES"].split(",")]
    sync = trainer.stop_signals.sync

    def decide(save: bool) -> Any:
        decision, step = sync(save), trainer.at.step
        stop = _SIGTERM if step >= max(saves) else decision.stop
        return decision._replace(save=step in saves or decision.save, stop=stop)

    trainer.stop_signals.sync = decide  # the loop calls it after the evaluations of a step, on every process


def recorded(rows: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> Records:
    """Return what a run recorded, by kind and name."""
    return {
        "saves": {f"weights of step {row['step']}": row["weights"] for row in rows if "weights" in row},
        "measurements": values_of(rows),
        "entries of the newest checkpoint": dict(leaves(state)),
    }
