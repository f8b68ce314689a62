"""The two recorded runs: their curves, and what differs between them."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common.base.errors import UserError
from common.checkpoint.fingerprint import HARMLESS, Change, changes
from common.checkpoint.guarantee import SAFE
from common.config.source import plain, read_file
from common.run.environment import installed
from tools.runs.read import RunFiles, read_run
from custom.config import Config

NOT_FINITE = "not a finite number"  # in the reason for which a run failed
# A resume may change these, but they decide what a new run trains or measures.
_DECIDING = (
    "progress.epoch", "progress.max_steps", "init_*", "plugins", "gpu_ids", "dist.processes", "dist.strategy",
    "prepare.*", "dataset.val", "dataset.val.*", "metric", "metric.*",
)  # fmt: skip
_ENVIRONMENT = ("packages", "machine", "environment", "world_size")  # of run.json; a short run cannot change them


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

    @property
    def diff(self) -> Path | None:
        """The uncommitted changes that it ran with, if any."""
        return self.files.path / "git.diff" if self.start["git"]["dirty"] else None

    def value(self, metric: str, step: int) -> float | None:
        """Return the recorded value, see `value_at`; NaN after a step whose loss was."""
        value = value_at(self.files, metric, step)
        return math.nan if value is None and NOT_FINITE in self.files.reason else value


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


def first_clear_step(good: Recorded, bad: Recorded, metric: str) -> tuple[int, bool]:
    """Return the step from which on the recorded values differ clearly, and True; or their last step, and False.

    Clearly: by at least half of what they differ in the end, and by more than both curves waver, which their bends
    tell. The noise over seeds is not known yet.

    Raises:
        UserError: there is no step that both have measured it at.
    """
    event, _, name = metric.partition(".")
    steps = sorted(step for step, values in good.files.measured(event).items() if name in values)
    curves = {step: (good.value(metric, step), bad.value(metric, step)) for step in steps}
    curves = {step: pair for step, pair in curves.items() if None not in pair}
    if not curves:
        names = {f"{kind}.{key}" for kind in ("train", "val") for row in good.files.measured(kind).values() for key in row}
        raise UserError(f"both runs must have measured {metric}; GOOD has {', '.join(sorted(names)) or 'nothing'}")
    gaps: dict[int, Any] = {step: b - a for step, (a, b) in curves.items()}  # type: ignore[operator]
    last = max(gaps)
    bends = [abs(x - 2 * y + z) for curve in zip(*curves.values()) for x, y, z in zip(curve, curve[1:], curve[2:])]
    wavers, end = 3 * median([each for each in bends if each == each] or [0.0]), gaps[last]
    unclear = [at for at, gap in gaps.items() if abs(gap) <= wavers or (end == end and gap * end < end * end / 2)]
    return min((at for at in gaps if at > max(unclear, default=0)), default=last), last not in unclear


def differing_settings(good: Recorded, bad: Recorded) -> dict[str, list[Change]]:
    """Return the settings that differ and may decide what is trained, each with its keys; the seed is not one of them.

    A setting is a key; where the `type` of a section differs, the section, since its arguments fit only together.
    """
    found = [each for each in changes(good.config, bad.config, Config()) if each.key != "dist.random_seed"]
    found = [each for each in found if each.matches(_DECIDING) or not each.matches(SAFE)]
    sections = [each.key.removesuffix("type") for each in found if each.key.endswith(".type")]
    settings: dict[str, list[Change]] = {}
    for each in found:
        section = next((name[:-1] for name in sections if each.key.startswith(name)), each.key)
        settings.setdefault(section, []).append(each)
    return settings


def differing_environment(good: Recorded, bad: Recorded) -> list[str]:
    """Return what else differs, in words: packages that may compute something, the machine, variables, processes."""
    old, new = ({key: each.start.get(key) for key in _ENVIRONMENT} for each in (good, bad))
    found = [(each, each.key.partition(".")) for each in changes(old, new) if not each.matches(HARMLESS)]
    here = {each.key: f" ({installed(name) or 'none'} here)" for each, (kind, _, name) in found if kind == "packages"}
    return [f"{name or kind} {each.old} -> {each.new}{here.get(each.key, '')}" for each, (kind, _, name) in found]


def mixed(good: Recorded, bad: Recorded, taken: Sequence[Change]) -> dict[str, Any]:
    """Return GOOD's config with some values of BAD's; a key that BAD does not have is left out."""
    config = deepcopy(good.config)
    for each in taken:
        *sections, name = each.key.split(".")
        source: Any = bad.config
        target: Any = config
        for section in sections:
            source, target = source.get(section) or {}, target.setdefault(section, {})
        target.pop(name, None)
        if name in source:
            target[name] = deepcopy(source[name])
    return config
