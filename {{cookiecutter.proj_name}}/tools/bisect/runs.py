"""Two recorded runs, how they differ, and short runs of GOOD with some of BAD's settings and code."""

import math
import re
import shutil
import sys
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.base.errors import UserError
from common.base.files import write_text
from common.base.text import flat, number
from common.checkpoint.resume import SAFE, Change, changes
from common.config import dump
from common.config.reading import Reader
from common.config.source import read_file
from common.run.paths import PROJECT
from tools.record.run import child_process, say
from tools.runs.read import RunFiles, read_run
from tools.same.sides import Side, git

# A resume may change these, but they decide what a new run trains or measures.
_DECIDING = (
    "progress.epoch", "progress.max_steps", "init_*", "plugins", "gpu_ids", "dist.processes", "dist.strategy",
    "prepare.*", "dataset.val", "dataset.val.*", "metric", "metric.*",
)  # fmt: skip
_POLL_S = 0.25
_NOT_FINITE = re.compile("not (a )?finite|has the norm|is bad")  # how such a run says why it ended
_LAST_CHARACTERS = 300  # of the output of a run that gives no value


@dataclass(frozen=True)
class Point:
    """The code at one point of the way: of a commit, perhaps with the uncommitted changes that a run recorded.

    Attributes:
        commit: empty without git: the code as it is now.
        step: how it differs from the point before.
        diff: what is in `git.diff` of the run.
    """

    commit: str
    step: str = ""
    diff: bytes = b""


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
        if not files.attempts:
            raise UserError(f"{folder} has no run.json; name the folder of a run, as in experiments/default")
        start = files.attempts[0]
        return cls(files, start, Reader(read_file(files.path / start["config"])).values)

    def code(self, step: str = "") -> Point:
        """Return the code that it ran."""
        git = self.start["git"]
        return Point(git["commit"] or "", step, (self.files.path / "git.diff").read_bytes() if git["dirty"] else b"")


def way(good: Recorded, bad: Recorded) -> list[Point]:
    """Return the code of GOOD, of each commit on the way, and of BAD; commits that change only pages are omitted.

    Raises:
        UserError: a commit is not in this repository, or GOOD's is not in the history of BAD's.
    """
    first = good.code()
    last = bad.code("BAD's uncommitted changes")
    if not first.commit or not last.commit:
        return [Point("")]
    if (first.commit, first.diff) == (last.commit, last.diff):
        return [first]
    if git("merge-base", first.commit, last.commit) != first.commit:
        raise UserError(f"GOOD's commit {first.commit} is not in the history of BAD's: exchange the two, or rebase")
    points = [first]
    if first.diff:
        points.append(Point(first.commit, "taking back GOOD's uncommitted changes"))
    words = ("--first-parent", "--reverse", "--format=%H commit %h '%s'", "--", ".", ":(exclude)*.md")
    for line in git("log", f"{first.commit}..{last.commit}", *words).splitlines():
        points.append(Point(line[:40], line[41:]))
    return [*points, last] if last.diff else points


def value_at(files: RunFiles, metric: str, step: int) -> float | None:
    """Return a value after `step` steps, or at the first measurement after that.

    None: it is not measured so far. NaN: it never will be, since something was not finite before.
    """
    event, _, name = metric.partition(".")
    curve = {at: values[name] for at, values in files.measured(event).items() if name in values}
    end = min((at for at in curve if at >= step), default=None)
    if end is None:
        return math.nan if _NOT_FINITE.search(files.reason) else None
    return curve[end]


def last_common_step(good: Recorded, bad: Recorded, metric: str) -> int:
    """Return the last step at which both have measured a value. Raises `UserError` if there is none."""
    event, _, name = metric.partition(".")
    steps = [{at for at, values in run.files.measured(event).items() if name in values} for run in (good, bad)]
    common = steps[0] & steps[1]
    if not common:
        raise UserError(f"both runs must have measured {metric}; GOOD has {', '.join(flat(good.files.last))}")
    return max(common)


def differing_settings(good: Recorded, bad: Recorded) -> dict[str, list[Change]]:
    """Return the settings that differ and may decide what is trained, each with its keys; the seed is not one of them.

    A setting is a key; where the `type` of a section differs, the section, since its arguments fit only together.
    """
    differing = [change for change in changes(good.config, bad.config) if change.key != "dist.random_seed"]
    sections = [change.key.removesuffix("type") for change in differing if change.key.endswith(".type")]
    settings: dict[str, list[Change]] = {}
    for change in differing:
        if change.matches(_DECIDING) or not change.matches(SAFE):
            section = next((name[:-1] for name in sections if change.key.startswith(name)), change.key)
            settings.setdefault(section, []).append(change)
    return settings


def mixed(good: dict[str, Any], bad: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Return GOOD's config with BAD's values of some keys; one that BAD does not have is left out."""
    config = deepcopy(good)
    for key in keys:
        *sections, name = key.split(".")
        source, target = bad, config
        for section in sections:
            source, target = source.get(section, {}), target.setdefault(section, {})
        target.pop(name, None)
        if name in source:
            target[name] = source[name]
    return config


@dataclass(frozen=True)
class Trial:
    """One short run: GOOD with the first `count` changes; `seed`: its offset from GOOD's."""

    count: int = 0
    seed: int = 0


class Trials:
    """Trains each trial up to a step of the whole run, and says its value on stderr.

    Args:
        metric: by default the value that chooses GOOD's best checkpoint.
        step: by default the last one that both have measured.
        folder: for code and runs.

    Attributes:
        settings: the keys of each setting that differs.
        points: of the code, from GOOD's to BAD's.
        values: of all trials so far; NaN if the loss was, None if it does not run.
    """

    def __init__(self, good: Recorded, bad: Recorded, metric: str | None, step: int | None, folder: Path) -> None:
        self.good, self.bad = good, bad
        self.metric = metric or f"val.{good.files.config.get('best.metric', 'loss')}"
        self.step = step or last_common_step(good, bad, self.metric)
        self.settings = list(differing_settings(good, bad).values())
        self.points = way(good, bad)
        self.values: dict[Trial, float | None] = {}
        self._folder = folder / "trial"

    @property
    def changes(self) -> list[str]:
        """All changes from GOOD to BAD in words, in their order."""
        steps = [point.step for point in self.points[1:]]
        return steps + [" and ".join(str(change) for change in keys) for keys in self.settings]

    def value(self, trial: Trial) -> float | None:
        """Train, or look the value up."""
        if trial not in self.values:
            started = time.monotonic()
            try:
                self.values[trial], note = self.train(trial)
            except UserError as error:
                self.values[trial], note = None, str(error)
            seconds, shown = time.monotonic() - started, show(self.values[trial])
            say(f"{len(self.values):3} {shown:>9} {seconds:6.1f} s  {self.describe(trial)} {note}".rstrip())
        return self.values[trial]

    def describe(self, trial: Trial) -> str:
        """Return a trial in words."""
        changes = self.changes
        what = "GOOD"
        if trial.count:
            what = f"GOOD with the changes up to {changes[trial.count - 1]}"
        if trial.count == len(changes):
            what = "BAD"
        return f"{what}; seed {self.good.start['seed'] + trial.seed}"

    def train(self, trial: Trial) -> tuple[float | None, str]:
        """Train until the value is measured. Returns it, or else None and why there is none."""
        shutil.rmtree(self._folder, ignore_errors=True)
        stored, output = self._folder / "stored", self._folder / "output.txt"
        stored.mkdir(parents=True)
        untracked = {name for run in (self.good, self.bad) for name in run.start["git"]["untracked"]}
        steps = len(self.points) - 1
        point = self.points[min(trial.count, steps)]
        side = Side("commit", point.commit, commit=point.commit)  # the owner's files and index are only read
        project = side.export(self._folder / "code", point.diff, untracked)
        keys = [change.key for keys in self.settings[: max(trial.count - steps, 0)] for change in keys]
        config = mixed(self.good.config, self.bad.config, keys)
        config["dist"]["random_seed"] = self.good.start["seed"] + trial.seed
        write_text(stored / "config.yaml", dump(config))
        write_text(stored / "run.json", '{"attempts": []}')  # beside it, a config may have keys that the code lacks
        data = PROJECT / Path(config["dir"].get("data_dir") or "data").expanduser()
        words = [f"--config={stored / 'config.yaml'}", f"--dir.runs_dir={self._folder}", f"--dir.data_dir={data}"]
        words += ["--name=run", "--resume=null", "--monitor.writers=[]"]
        command = [sys.executable, str(project / "train.py"), *words]
        with child_process(command, output) as run:
            while run.poll() is None and self._measured() is None:
                time.sleep(_POLL_S)
        value, text = self._measured(), " ".join(output.read_text(errors="replace").split())
        return value, f"... {text[-_LAST_CHARACTERS:]}" if value is None else ""

    def _measured(self) -> float | None:
        return value_at(read_run(self._folder / "run"), self.metric, self.step)


def show(value: float | None) -> str:
    """Return a value as it is printed."""
    return "none" if value is None else number(value).strip()
