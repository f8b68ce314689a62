"""Short runs of mixtures of two recorded runs. Their results are kept in a file."""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any

from common.base.errors import UserError
from common.base.files import write_text
from common.base.process import die_with_parent
from common.base.text import to_json
from common.config import dump
from common.run.environment import packages
from common.run.metrics import read_metrics
from common.run.paths import PROJECT, RunPaths
from tools.bisect.code import Copies, points_between
from tools.bisect.records import NOT_FINITE, Recorded, differing_settings, mixed, value_at
from tools.bisect.search import Trial
from tools.runs.read import RunFiles

_POLL_S = 0.1
_END_S = 60.0  # for a run to save and end
_UNKNOWN = re.compile(r"keys that are left out:((?:\n  \S+ = .*)+)")  # the log, if the config is newer than the code


@dataclass(frozen=True)
class Result:
    """The value of a trial, NaN if its loss was; None with the reason in `note` if it does not run."""

    value: float | None
    note: str
    seconds: float


class Trials:
    """Trains GOOD with some of BAD's settings and code, for a few steps of the whole run.

    Args:
        file: keeps the results, a JSON object in each line.
        scratch: an empty folder for code and runs.
    """

    def __init__(self, good: Recorded, bad: Recorded, metric: str, step: int, file: Path, scratch: Path) -> None:
        self.good, self.bad, self.metric, self.step = good, bad, metric, step
        self.settings, self.points = differing_settings(good, bad), points_between(good, bad)
        untracked = [name for run in (good, bad) for name in run.start["git"]["untracked"] if name.endswith(".py")]
        self.copies = Copies(scratch / "code", self.points, untracked)
        self._file, self._scratch = file, scratch
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [row for row in map(json.loads, lines) if row["value"] is not None]  # what did not run is tried again
        self._known = {row["key"]: Result(float(row["value"]), row["note"], row["seconds"]) for row in rows}

    def result(self, trial: Trial) -> Result:
        """Train, or look the result up."""
        taken = [each for name, keys in self.settings.items() if name in trial.settings for each in keys]
        config = mixed(self.good, self.bad, taken)
        config.setdefault("dist", {})["random_seed"] = self.good.start["seed"] if trial.seed is None else trial.seed
        points = [trial.point, *(point for step in sorted(trial.without) for point in (step, step + 1))]
        code = [self.copies.digest(point) for point in points]
        about = to_json([config, code, self.metric, self.step, packages(), sys.version])
        key = hashlib.sha256(about.encode()).hexdigest()[:16]
        if key not in self._known:
            started = time.monotonic()
            try:
                value, note = self._train(self.copies.project(trial.point, trial.without), config)
            except UserError as error:
                value, note = None, str(error)
            self._known[key] = Result(value, note, round(time.monotonic() - started, 1))
            with self._file.open("a", encoding="utf-8") as file:
                file.write(to_json({"key": key, **asdict(self._known[key])}) + "\n")
        return self._known[key]

    def _train(self, project: Path, config: dict[str, Any]) -> tuple[float | None, str]:
        """Train until the value is measured. Returns it, and a note."""
        folder, stored = RunPaths(self._scratch / "runs" / "run"), self._scratch / "stored"
        shutil.rmtree(folder.root.parent, ignore_errors=True)
        stored.mkdir(exist_ok=True)
        data = PROJECT / Path(config.get("dir", {}).get("data_dir") or "data").expanduser()
        config = {**config, "name": folder.name, "resume": None}
        config["dir"] = {**config.get("dir", {}), "runs_dir": str(folder.root.parent), "data_dir": str(data)}
        config["monitor"] = {**config.get("monitor", {}), "writers": []}
        write_text(stored / "config.yaml", dump(config))
        write_text(stored / "run.json", '{"attempts": []}')  # beside it, a config may have keys that the code lacks
        start, output = self.good.start, self._scratch / "output.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": str(start["cpu_threads"]), **start["environment"]}
        place = Path(start["working_directory"])  # relative paths begin there
        command = [sys.executable, str(project / "train.py"), "--config", str(stored / "config.yaml")]
        with output.open("wb") as file:
            process = Popen(command, cwd=place if place.is_dir() else PROJECT, env=environment, stdin=DEVNULL,
                            stdout=file, stderr=STDOUT, start_new_session=True,
                            preexec_fn=partial(die_with_parent, os.getpid()))  # fmt: skip
        value = None
        try:
            while process.poll() is None and value is None:
                time.sleep(_POLL_S)
                value = value_at(measured(folder), self.metric, self.step)
        finally:
            end(process)
        files, text = measured(folder), output.read_text(errors="replace")
        steps = files.measured(self.metric.partition(".")[0])
        if process.returncode == 0 and steps:  # in all, it may have fewer steps
            value = value_at(files, self.metric, min(self.step, max(steps)))
        if value is None and NOT_FINITE in text:
            return math.nan, "the loss is no longer finite"
        if value is None:
            return None, " ".join(line.strip() for line in text.splitlines() if line.strip(" ="))[-300:]
        keys = [line.split()[0] for match in _UNKNOWN.findall(text) for line in match.splitlines() if line]
        return value, f"without {', '.join(keys)}, which this code does not have" if keys else ""


def measured(folder: RunPaths) -> RunFiles:
    """Return the measurements of a short run so far."""
    with suppress(OSError):
        return RunFiles(folder.root, folder.name, records=read_metrics(folder.metrics_file))
    return RunFiles(folder.root, folder.name)


def end(process: "Popen[bytes]") -> None:
    """End a run and all its processes, first as a person would."""
    process.terminate()
    with suppress(TimeoutExpired):
        process.wait(_END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
