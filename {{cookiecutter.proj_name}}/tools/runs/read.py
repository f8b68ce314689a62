"""Reads the files of a run, for programs that show or compare runs. Nothing here writes to disk."""

import fcntl
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.base.text import flat
from common.config.reading import Reader
from common.config.source import read_file
from common.run.paths import RunPaths


@dataclass
class RunFiles:
    """The files of a run. What cannot be read is empty, and `problems` says why.

    Attributes:
        config: configuration of the last attempt, by dotted key; a list is a value.
        attempts: entries of run.json, one for each start or resume.
        records: lines of metrics.jsonl; `values` are numbers, NaN and infinite ones too.
        state: running, stopped, failed, finished; or killed, if it ended without recording that.
        reason: why it ended, such as finished, early_stop, SIGTERM, or an error.
        step: of the last measurement, or of the status if that is later.
        problems: files that are missing or damaged.
    """

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    state: str = "running"
    reason: str = ""
    step: int = 0
    problems: list[str] = field(default_factory=list)

    def measured(self, event: str) -> dict[int, dict[str, float]]:
        """Return the values of train, speed, val or eval by optimizer step, in the order of the steps."""
        return {row["step"]: row["values"] for row in self.records if row["event"] == event}

    @property
    def last(self) -> dict[str, dict[str, float]]:
        """The last values of train, val and eval; those that were never measured are missing."""
        return {row["event"]: row["values"] for row in self.records if row["event"] in ("train", "val", "eval")}

    @property
    def best(self) -> dict[str, Any] | None:
        """`{metric, mode, value, step}` of the validation that best.pt is of; None before the first."""
        metric = self.config.get("best.metric", "loss")
        val = self.measured("val")
        found = None
        for row in self.records:
            if row["event"] == "checkpoint" and row.get("best") and metric in val.get(row["step"], {}):
                value = val[row["step"]][metric]
                found = {"metric": metric, "mode": row.get("mode"), "value": value, "step": row["step"]}
        return found


def read_run(folder: Path) -> RunFiles:
    """Read a run, even a damaged one."""
    paths = RunPaths(folder)
    run = RunFiles(folder, folder.resolve().name)

    def tried(file: Path, read: Callable[[Path], Any], otherwise: Any) -> Any:
        """Return what `read` makes of a file; `otherwise`, and a problem of the run, if it cannot."""
        try:
            return read(file)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            run.problems.append(f"{file.name}: {error}")
            return otherwise

    run.attempts = tried(paths.record_file, lambda file: json.loads(file.read_text())["attempts"], [])
    config = paths.config_file
    if run.attempts:
        config = folder / run.attempts[-1].get("config", config.name)
    run.config = tried(config, lambda file: flat(Reader(read_file(file)).values), {})
    run.records = tried(paths.metrics_file, read_metrics, [])
    status = tried(paths.status_file, lambda file: dict(json.loads(file.read_text())), {})
    run.state = status.get("state", "running")
    run.reason = status.get("reason", "")
    if run.state == "running" and not is_held(paths.lock_file):
        run.state = "killed"
    run.step = max([status.get("step") or 0, *(row["step"] for row in run.records)])
    return run


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock file `path`. Takes the lock for a moment, shared with others who ask."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file in their order, each with `event`, `step` and `values`.

    Values are floats, NaN and infinite ones too. A last line that a kill has cut off is left out. Raises `OSError`, and
    `ValueError` for another line that is no JSON.
    """
    rows = []
    for line in file.read_text().split("\n")[:-1]:
        row = {"event": "", "step": 0, "values": {}, **json.loads(line)}
        row["step"] = int(row["step"])
        row["values"] = {name: float(value) for name, value in row["values"].items()}
        rows.append(row)
    return rows
