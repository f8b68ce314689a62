"""Reads the files of a run, for programs that show or compare runs. Nothing here writes to disk."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.config.source import Node, by_key, plain, read_file
from common.run.paths import RunPaths
from common.run.status import is_held


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
        """`{metric, value, step}` of the validation that best.pt is of; None before the first."""
        metric, val = self.config.get("best.metric", "loss"), self.measured("val")
        saved = [row["step"] for row in self.records if row["event"] == "checkpoint" and row.get("best")]
        steps = [step for step in saved if metric in val.get(step, {})]
        return {"metric": metric, "value": val[steps[-1]][metric], "step": steps[-1]} if steps else None


def read_run(folder: Path) -> RunFiles:
    """Read a run, even a damaged one."""
    paths, run = RunPaths(folder), RunFiles(folder, folder.resolve().name)
    with _noting(run, paths.record_file):
        run.attempts = [dict(attempt) for attempt in json.loads(paths.record_file.read_text())["attempts"]]
    with _noting(run, file := folder / (run.attempts[-1]["config"] if run.attempts else paths.config_file.name)):
        run.config = leaves(read_file(file))
    with _noting(run, paths.metrics_file):
        run.records = read_metrics(
            paths.metrics_file, lambda error: run.problems.append(f"{paths.metrics_file.name}: {error}")
        )
    with _noting(run, paths.status_file):
        status = json.loads(paths.status_file.read_text())
        run.state, run.step, run.reason = status["state"], status["step"] or 0, status["reason"]
    if run.state == "running" and not is_held(paths.lock_file):
        run.state = "killed"
    run.step = max([run.step, *(row["step"] for row in run.records)])
    return run


def leaves(config: Node) -> dict[str, Any]:
    """Return the values of a config by dotted key. Lists and empty sections are values."""
    nodes = [(key, node) for key, node in by_key(config) if "[" not in key]  # a list counts as a whole
    return {key: plain(node) for key, node in nodes if node.value == {} or not isinstance(node.value, dict)}


@contextmanager
def _noting(run: RunFiles, file: Path) -> Iterator[None]:
    """Add an error in the block to the problems of the run."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        run.problems.append(f"{file.name}: {error.strerror if isinstance(error, OSError) else error}")


def read_metrics(
    file: Path,
    on_error: Callable[[Exception], None] = lambda error: None,
) -> list[dict[str, Any]]:
    """Read the lines of a metrics file in their order, each with `event`, `step` and `values`.

    Values are floats, NaN and infinite ones too. A damaged line is skipped and its error given to `on_error`; a last
    line that a kill has cut off is no damage. Raises `OSError`.
    """
    rows = []
    for line in file.read_text(errors="replace").split("\n")[:-1]:
        try:
            row = json.loads(line)
            measured = row.get("values", {})
            values = {name: float(value) for name, value in measured.items()}
        except (ValueError, TypeError, AttributeError) as error:
            on_error(error)
        else:
            rows.append({"event": "", "step": 0, **row, "values": values})
    return rows
