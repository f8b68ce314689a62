"""Train a part of a run again in a temporary folder, and compare the bits."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from common.base.errors import UserError
from common.base.files import PROJECT
from common.base.process import die_with_parent
from common.checkpoint.file import read_checkpoint
from common.config import dump
from common.run.metrics import read_metrics
from common.run.paths import RunPaths
from common.run.record import RESULT_VARIABLES
from tools.same.folders import equal, explain, leaves
from tools.verify.stored import Segment, StoredRun

_SIGTERM, _STOPPED = 15, 143  # the replay stops as by this signal, and exits with this code
_EVALUATED = ("owed", "values", "best", "schedule", "stages")  # entries of a checkpoint that an evaluation changes
_SHOWN = 5  # entries that differ
_LAST_LINES = 15  # of the output of a replay that failed


def replay(run: StoredRun, segment: Segment, config: Mapping[str, Any], folder: Path) -> RunPaths:
    """Train the segment again in `folder`. Raises `UserError` with the last lines of its output if that fails."""
    attempt, ranks = segment.attempt, segment.state["fingerprint"]["ranks"]
    file, output = folder / "config.yaml", folder / "output.txt"
    file.write_text(dump({**config, "dir": {**config["dir"], "runs_dir": str(folder)}}))
    speeds = [row["values"]["step_seconds"] for row in run.rows if row["event"] == "speed"]
    seconds = (segment.last - segment.first) * statistics.median(speeds or [0])
    took = f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
    what = f"steps {segment.first + 1} to {segment.last} on {ranks} process{'es' * (ranks > 1)}"
    print(f"replaying {what}: about {took}, its start and evaluations not counted; log: {folder}/replay/train.log")
    sys.stdout.flush()
    variables = {name: value for name, value in os.environ.items() if name not in RESULT_VARIABLES}
    variables |= {**attempt["environment"], "OMP_NUM_THREADS": str(attempt["cpu_threads"])}
    variables["VERIFY_SAVES"] = ",".join(str(step) for step in {*run.recorded, segment.last} if step <= segment.last)
    program, place = PROJECT / Path(attempt["argv"][0]).name, Path(attempt["working_directory"])
    command = [sys.executable, str(program if program.is_file() else PROJECT / "train.py"), "--config", str(file)]
    began, place = time.monotonic(), place if place.is_dir() else PROJECT
    alone = partial(die_with_parent, os.getpid())
    with output.open("wb") as out:
        ended = subprocess.run(command, cwd=place, env=variables, stdout=out, stderr=out, preexec_fn=alone, check=False)
    if ended.returncode not in (0, _STOPPED):
        lines = output.read_text(errors="replace").rstrip().splitlines()[-_LAST_LINES:]
        raise UserError("\n  ".join([f"the replay ended with exit code {ended.returncode}:", *lines]))
    print(f"replayed in {time.monotonic() - began:.0f} s", flush=True)
    return RunPaths(folder / "replay")


def stop_at_end(trainer: Any) -> None:
    """Save at the steps in VERIFY_SAVES, and stop after the last of them. A plugin of the replay."""
    saves = {int(step) for step in os.environ["VERIFY_SAVES"].split(",")}
    sync = trainer.stop_signals.sync

    def decide(save: bool) -> Any:
        decision, step = sync(save), trainer.at.step
        stop = _SIGTERM if step >= max(saves) else decision.stop
        return decision._replace(save=True, stop=stop) if step in saves else decision

    trainer.stop_signals.sync = decide  # the loop calls it after the evaluations of a step, on every process


def compare_bits(run: StoredRun, segment: Segment, replayed: RunPaths) -> tuple[dict[str, int], list[str]]:
    """Compare the replay with the run. Returns how much of each was compared, and sentences about what differs."""
    rows, owed = read_metrics(replayed.metrics_file), bool(segment.state["owed"])
    saves = {row["step"]: row["weights"] for row in rows if row["event"] == "checkpoint"}
    steps = [step for step in sorted(saves.keys() & run.recorded.keys()) if segment.first < step <= segment.last]
    other = [step for step in steps if saves[step] != run.recorded[step]]
    different = [f"{len(other)} of {len(steps)} saves, first the weights of step {step}" for step in other[:1]]
    # Evaluations of the last step that a signal interrupted are not in the run.
    first, last = segment.first if segment.start else -1, segment.last - owed
    ours, theirs = _measured(run.rows, first, last), _measured(rows, first, last)
    keys = sorted({*ours, *theirs})
    bad = [key for key in keys if not equal(ours.get(key), theirs.get(key))]
    for key in bad[:1]:
        where = f"first in the {key[1]} row of step {key[0]}: {key[2]}"
        different += [f"{len(bad)} of {len(keys)} measurements, {where}: {explain(ours.get(key), theirs.get(key))}"]
    latest = read_checkpoint(replayed.checkpoints / "latest.pt")
    before, after = dict(leaves(segment.state)), dict(leaves(latest))
    names = [name for name in {**before, **after} if not (owed and name.partition(".")[0] in _EVALUATED)]
    unequal = [name for name in names if not equal(before.get(name), after.get(name))]
    if unequal:
        apart, far = max((distance(before.get(name), after.get(name)), name) for name in unequal)
        text = f"tensors up to {apart:.2g} apart, relative to their largest number ({far})"
        different += [f"{len(unequal)} of {len(names)} entries of the checkpoint of step {segment.last}; {text}:"]
        different += [f"  {name}: {explain(before.get(name), after.get(name))}" for name in unequal[:_SHOWN]]
        different += [f"  and {len(unequal) - _SHOWN} more"] * (len(unequal) > _SHOWN)
    tensors = sum(isinstance(before.get(name), Tensor) for name in names)
    counts = {"saves": len(steps), "measurements": len(keys), "tensors": tensors}
    return {**counts, "other entries": len(names) - tensors}, different


def _measured(rows: Sequence[Mapping[str, Any]], first: int, last: int) -> dict[tuple[int, str, str], float]:
    found = [row for row in rows if row["event"] != "speed" and first < row["step"] <= last]
    return {(row["step"], row["event"], name): value for row in found for name, value in row["values"].items()}


def distance(a: Any, b: Any) -> float:
    """The largest difference of two tensors of floats, relative to the largest number of `a`; 0 for anything else."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.is_floating_point()):
        return 0.0
    return ((a.double() - b.double()).abs().max() / a.double().abs().max().clamp_min(1e-300)).item()
