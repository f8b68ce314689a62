"""The two recorded runs, and short runs of mixtures of them, whose results are kept in a file."""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any, NamedTuple

from common.base.errors import UserError
from common.base.files import write_text
from common.base.process import die_with_parent
from common.base.text import to_json
from common.checkpoint.fingerprint import HARMLESS, Change, changes
from common.checkpoint.guarantee import SAFE
from common.config import dump
from common.config.source import plain, read_file
from common.run.environment import packages
from common.run.paths import PROJECT
from tools.bisect.code import Copies, Point, way
from tools.bisect.search import Trial
from tools.runs.read import RunFiles, read_run
from custom.config import Config

# A resume may change these, but they decide what a new run trains or measures.
_DECIDING = (
    "progress.epoch", "progress.max_steps", "init_*", "plugins", "gpu_ids", "dist.processes", "dist.strategy",
    "prepare.*", "dataset.val", "dataset.val.*", "metric", "metric.*",
)  # fmt: skip
_ENVIRONMENT = ("packages", "machine", "environment", "world_size")  # of run.json; a short run cannot change them
_NOT_FINITE = "not a finite number"  # in the reason for which a run failed
_LEFT_OUT = re.compile(r"keys that are left out:((?:\n  \S+ = .*)+)")  # in the log of code older than the config
_POLL_S = 0.25
# Blocked while a process is started: Ctrl-C would be lost there, and leave a lock behind that the next start waits for.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Recorded:
    """A recorded run: its files, its first start in run.json, and the config of that start as plain data."""

    files: RunFiles
    start: dict[str, Any]
    config: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Recorded":
        """Read the folder of a run. Raises `UserError` if it has no record of its start."""
        files = read_run(folder.resolve())
        if not files.attempts or not (file := files.path / files.attempts[0]["config"]).is_file():
            raise UserError(f"{folder} has no run.json or config; name the folder of a run, as in experiments/default")
        return cls(files, files.attempts[0], plain(read_file(file)))

    def code(self, step: str = "") -> Point:
        """Return the code that it ran."""
        git = self.start["git"]
        return Point(git["commit"], step, self.files.path / "git.diff" if git["dirty"] else None)

    def value(self, metric: str, step: int) -> float | None:
        """Return the recorded value, see `value_at`; NaN after a step whose loss was."""
        value = value_at(self.files, metric, step)
        return math.nan if value is None and _NOT_FINITE in self.files.reason else value


def value_at(files: RunFiles, metric: str, step: int) -> float | None:
    """Return a value after `step` steps, or at the first measurement after that; None: not measured so far.

    `train.NAME` is the mean over the second half of the steps up to there: the losses of single batches waver.
    """
    event, _, name = metric.partition(".")
    curve = {at: values[name] for at, values in files.measured(event).items() if name in values}
    if (end := min((at for at in curve if at >= step), default=None)) is None:
        return None
    chosen = [value for at, value in curve.items() if (end / 2 < at <= end if event == "train" else at == end)]
    return math.fsum(chosen) / len(chosen)


def default_metric(good: Recorded, bad: Recorded) -> str:
    """Return the value that chooses the best checkpoint, if both measured it; otherwise the training loss."""
    name = good.files.config.get("best.metric", "loss")
    is_known = all(any(name in row for row in each.files.measured("val").values()) for each in (good, bad))
    return f"val.{name}" if is_known else "train.loss"


def first_clear_step(good: Recorded, bad: Recorded, metric: str) -> tuple[int, int]:
    """Return the step from which on the recorded values differ clearly, or else the last; and the last.

    Clearly: by at least half of what they differ in the end, and by more than both curves waver, which their bends
    tell. The noise over seeds is not known yet.

    Raises:
        UserError: there is no step after which both have measured it.
    """
    steps = sorted(good.files.measured(metric.partition(".")[0]))
    pairs = [(step, good.value(metric, step), bad.value(metric, step)) for step in steps]
    curves = [(step, a, b) for step, a, b in pairs if a is not None and b is not None]
    if not curves:
        known = sorted({f"{split}.{name}" for split, values in good.files.last.items() for name in values})
        raise UserError(f"both runs must have measured {metric}; GOOD has {', '.join(known) or 'nothing'}")
    gaps = {step: b - a for step, a, b in curves}
    threes = [
        three for at in (1, 2) for three in zip(*([row[at] for row in curves[k:]] for k in range(3)), strict=False)
    ]
    bends = [bend for a, b, c in threes if math.isfinite(bend := abs(a - 2 * b + c))]
    wavers, end, last = 3 * median(bends or [0.0]), curves[-1][2] - curves[-1][1], curves[-1][0]
    unclear = [at for at, gap in gaps.items() if abs(gap) <= wavers or (end == end and gap * end < end * end / 2)]
    return min((at for at in gaps if at > max(unclear, default=0)), default=last), last


def differing_settings(good: Recorded, bad: Recorded) -> dict[str, list[Change]]:
    """Return the settings that differ and may decide what is trained, each with its keys; the seed is not one of them.

    A setting is a key; where the `type` of a section differs, the section, since its arguments fit only together.
    """
    found = [each for each in changes(good.config, bad.config, Config()) if each.key != "dist.random_seed"]
    sections = [each.key.removesuffix("type") for each in found if each.key.endswith(".type")]
    settings: dict[str, list[Change]] = {}
    for each in found:
        if each.matches(_DECIDING) or not each.matches(SAFE):
            section = next((name[:-1] for name in sections if each.key.startswith(name)), each.key)
            settings.setdefault(section, []).append(each)
    return settings


def differing_environment(good: Recorded, bad: Recorded) -> list[str]:
    """Return what else differs, in words: packages that may compute something, the machine, variables, processes."""
    old, new = ({key: each.start.get(key) for key in _ENVIRONMENT} for each in (good, bad))
    found = [each for each in changes(old, new) if not each.matches(HARMLESS)]
    return [each.arrow for each in found if None not in (each.old, each.new)]  # a package that only one has imported


def mixed(good: dict[str, Any], bad: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Return GOOD's config with BAD's values of some keys; one that BAD does not have is left out."""
    config = deepcopy(good)
    for key in keys:
        *sections, name = key.split(".")
        source, target = bad, config
        for section in sections:
            source, target = source.get(section) or {}, target.setdefault(section, {})
        target.pop(name, None)
        target |= {name: source[name]} if name in source else {}
    return config


class Result(NamedTuple):
    """The value of a trial, NaN if the loss was; None if it does not run, with the reason in `note`."""

    value: float | None
    note: str
    seconds: float


class Trials:
    """Trains GOOD with some of BAD's settings and code, for the first steps of the whole run.

    Args:
        file: keeps the results, a JSON list in each line.
        scratch: an empty folder for code and runs.
    """

    def __init__(self, good: Recorded, bad: Recorded, metric: str, step: int, file: Path, scratch: Path) -> None:
        self.good, self.bad, self.metric, self.step = good, bad, metric, step
        self.settings = differing_settings(good, bad)
        self.points = way(good.code(), bad.code("BAD's uncommitted changes"))
        untracked = [name for run in (good, bad) for name in run.start["git"]["untracked"] if name.endswith(".py")]
        self.copies = Copies(scratch / "code", self.points, untracked)
        self._file, self._scratch = file, scratch
        rows = map(json.loads, file.read_text().splitlines() if file.exists() else [])
        self._known = {key: Result(float(value), *rest) for key, value, *rest in rows if value is not None}

    def result(self, trial: Trial) -> Result:
        """Train, or look the result up."""
        keys = [each.key for name, found in self.settings.items() if name in trial.settings for each in found]
        config = mixed(self.good.config, self.bad.config, keys)
        config.setdefault("dist", {})["random_seed"] = self.good.start["seed"] if trial.seed is None else trial.seed
        points = [trial.point, *(point for step in sorted(trial.without) for point in (step, step + 1))]
        about = to_json([config, [*map(self.copies.digest, points)], self.metric, self.step, packages(), sys.version])
        key = hashlib.sha256(about.encode()).hexdigest()[:16]
        if key not in self._known:
            started = time.monotonic()
            try:
                value, note = self._train(self.copies.project(trial.point, trial.without), config)
            except UserError as error:
                value, note = None, str(error)
            self._known[key] = Result(value, note, round(time.monotonic() - started, 1))
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(to_json([key, *self._known[key]]) + "\n")
        return self._known[key]

    def _train(self, project: Path, config: dict[str, Any]) -> tuple[float | None, str]:
        """Train until the value is measured. Returns it, and a note."""
        runs, stored, output = (self._scratch / name for name in ("runs", "stored", "output.txt"))
        shutil.rmtree(runs, ignore_errors=True)
        stored.mkdir(exist_ok=True)
        write_text(stored / "config.yaml", dump(config))
        write_text(stored / "run.json", '{"attempts": []}')  # beside it, a config may have keys that the code lacks
        data = PROJECT / Path(config.get("dir", {}).get("data_dir") or "data").expanduser()
        words = [f"--config={stored / 'config.yaml'}", "--name=run", f"--dir.runs_dir={runs}", f"--dir.data_dir={data}"]
        command = [sys.executable, str(project / "train.py"), *words, "--resume=null", "--monitor.writers=[]"]
        start, place = self.good.start, Path(self.good.start["working_directory"])
        place = place if place.is_dir() else PROJECT  # where relative paths begin
        alone: dict[str, Any] = {"start_new_session": True, "preexec_fn": partial(_begin, os.getpid())}
        alone["env"] = {**os.environ, "OMP_NUM_THREADS": str(start["cpu_threads"]), **start["environment"]}
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        with (
            output.open("wb") as file,
            Popen(command, cwd=place, stdin=DEVNULL, stdout=file, stderr=STDOUT, **alone) as process,
        ):
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
                while process.poll() is None and value_at(read_run(runs / "run"), self.metric, self.step) is None:
                    time.sleep(_POLL_S)
            finally:
                process.terminate()  # it saves and ends
                process.wait()
        files, text = read_run(runs / "run"), output.read_text(errors="replace")
        last = files.step if files.state == "finished" else self.step  # with larger batches, a run has fewer steps
        value = value_at(files, self.metric, min(self.step, last))
        if value is None:
            return (math.nan, "") if _NOT_FINITE in text else (None, f"... {' '.join(text.split())[-200:]}")
        keys = [line.split()[0] for lines in _LEFT_OUT.findall(text) for line in lines.strip().splitlines()]
        return value, f"this code does not have {', '.join(keys)}" if keys else ""


def _begin(parent: int) -> None:
    """Begin a process: end it with its parent, and let it be interrupted."""
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
