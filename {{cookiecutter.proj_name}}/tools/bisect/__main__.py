"""Find the key or the commit that makes two runs differ: python -m tools.bisect GOOD BAD

Trains short runs with some settings and some commits of each. Exit code 0: found; 1: the difference is within the noise
over seeds, or nothing that a run can change makes it; 2: it cannot be searched for.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common.base.errors import UserError
from common.base.text import number, plain
from common.failure.program import report_errors
from tools.bisect.records import Recorded, default_metric, differing_environment, first_clear_step
from tools.bisect.search import Cause, Noise, Trial, find_causes, most_runs
from tools.bisect.trials import Trials

_START_S = 6.0  # of a run, until its first step; a guess


class Search:
    """Measures the noise and searches; says each run as it ends, on stderr.

    Attributes:
        values: of all trials so far, by trial; None if one does not run.
        runs: how many trials the search has taken, without those that measure GOOD, its noise and BAD.
    """

    def __init__(self, trials: Trials, seeds: int) -> None:
        self.trials, self.settings, self.points, self.runs = trials, trials.settings, trials.points, 0
        self.values: dict[Trial, float | None] = {}
        self.worst = Trial(frozenset(self.settings), len(self.points) - 1)
        seed = trials.good.start["seed"]
        good = [Trial(), *(Trial(seed=seed + more) for more in range(1, seeds))]
        self.noise = Noise([self.measure(each, f"GOOD, seed {seed + at}") for at, each in enumerate(good)])
        self.bad = self.measure(self.worst, f"BAD, seed {seed}")

    def measure(self, trial: Trial, what: str) -> float:
        """Return the value of a run without which there is no search. Raises `UserError` if it has none."""
        self.values[trial] = value = self._run(trial, what)
        if value is None or (value != value and not trial.settings and not trial.point):
            raise UserError(f"{what} has no value to compare with: {self.trials.result(trial).note}")
        return value

    def is_bad(self, trial: Trial) -> bool | None:
        """Return whether a trial is rather BAD than GOOD; None if it does not run."""
        if trial not in self.values:
            self.runs += 1
            self.values[trial] = self._run(trial, self.describe(trial), f"{self.runs}")
        value = self.values[trial]
        return None if value is None else self.noise.is_bad(value, self.bad)

    def _run(self, trial: Trial, what: str, count: str = "") -> float | None:
        result = self.trials.result(trial)
        verdict = ""
        if count:
            verdict = "skipped" if result.value is None else "bad" if self.noise.is_bad(result.value, self.bad) else "good"
        shown = "" if result.value is None else number(result.value)
        more = f"  ({result.note})" if result.note else ""
        print(f"{count:>3} {shown:>9} {verdict:<7} {result.seconds:5.1f} s  {what}{more}", file=sys.stderr, flush=True)
        return result.value

    def describe(self, trial: Trial) -> str:
        """Return a trial in words: whose settings, whose code."""
        taken, left = ([key for key in self.settings if (key in trial.settings) == has] for has in (True, False))
        few = f"GOOD's settings, BAD's {_listed(taken)}" if len(taken) <= len(left) else f"BAD's, GOOD's {_listed(left)}"
        few = "BAD's settings" if not left else few if taken else "GOOD's settings"
        code = {0: "GOOD's code", self.worst.point: "BAD's code"}.get(trial.point)
        code = code or f"code of {self.points[trial.point].step}"
        back = "".join(f" without {self.points[step + 1].step}" for step in sorted(trial.without))
        return "; ".join([few] * bool(self.settings) + [code + back] * bool(self.worst.point))

    def explain(self, cause: Cause) -> str:
        """Return a cause in words, with the values that prove it."""
        parts = [change.arrow for name in self.settings if name in cause.settings for change in self.settings[name]]
        steps = [f"{self.points[step + 1].step} ({_listed(self.trials.copies.changed(step))})" for step in cause.steps]
        parts += [f"one of these, which no run tells apart: {'; '.join(steps)}"] if len(steps) > 1 else steps
        name, without = self.trials.metric, self.values[cause.absent]
        verb = "makes" if len(parts) == 1 else "together make"
        text = f"{' and '.join(parts)} {verb} the difference: {name} {self._value(cause.present)} in GOOD with it"
        if without is None:
            return f"{text}; BAD without it does not run: {self.trials.result(cause.absent).note}"
        return f"{text}, {self._value(cause.absent)} in BAD without it"

    def _value(self, trial: Trial) -> str:
        return number(value).strip() if (value := self.values[trial]) is not None else "unknown"


def _listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def announce(search: Trials, seeds: int, why: str, file: Path) -> str:
    """Return what differs, what will be measured, and how many runs that takes."""
    good, bad, settings, steps = search.good, search.bad, search.settings, len(search.points) - 1
    dirty = any(point.diff for point in search.points)
    code = f"{steps} steps of the code (commits{' and uncommitted changes' if dirty else ''})"
    other = differing_environment(good, bad)
    started = [each.start["seed"] for each in (good, bad)]
    pace = median([row["step_seconds"] for row in good.files.measured("speed").values()] or [0.0])
    length, most = _START_S + pace * search.step, seeds + 1 + most_runs(len(settings), steps)
    lines = [
        f"differ: {len(settings)} settings ({_listed([*settings])}), {code}" if settings else f"differ: {code}",
        *([f"        seeds {started[0]} -> {started[1]}"] if started[0] != started[1] else []),
        *([f"        {'; '.join(other)}: no run here can change these"] if other else []),
        f"measured: {search.metric} after step {search.step}, {why}",
        f"runs: {seeds} seeds of GOOD, BAD, and at most {most - seeds - 1} to search for one change (more, if several "
        f"are needed together), of about {length:.0f} s: {most * length / 60:.0f} minutes; kept in {file}",
    ]
    return "\n".join(lines)


def conclude(search: Search) -> tuple[int, str, list[Cause]]:
    """Search if there is something to find. Returns the exit code, the conclusion, and the causes."""
    trials, noise = search.trials, search.noise
    metric, step, seed = trials.metric, trials.step, trials.bad.start["seed"]
    spread = f"{number(noise.mean).strip()} +- {number(noise.deviation).strip()} over seeds"
    if not noise.hides(search.bad):
        causes = list(find_causes([*search.settings], search.worst.point, search.is_bad))
        text = "\n".join([*map(search.explain, causes), f"{search.runs} runs; GOOD has {spread}"])
        return 0, text, causes
    if seed != trials.good.start["seed"]:
        own = search.measure(replace(search.worst, seed=seed), f"BAD, seed {seed}")
        if not noise.hides(own):
            return 0, f"seed {seed} makes the difference: {metric} {number(own).strip()}, of GOOD {spread}", []
    values = [trials.good.value(metric, step), trials.bad.value(metric, step)]
    if any(value is not None and not noise.hides(value) for value in values):
        rest = "; ".join(differing_environment(trials.good, trials.bad))
        text = f"the records have {' and '.join(map(str, values))}, but here GOOD has {spread}, and BAD's settings and "
        text += f"code have {number(search.bad).strip()}: what differs is in neither of them, but in "
        return (0 if rest else 1), text + (rest or "data, files that git does not know, or chance on a GPU"), []
    end = max(trials.good.files.measured(metric.partition(".")[0]), default=step)
    ends = [each.value(metric, end) for each in (trials.good, trials.bad)]
    text = f"the difference is within the noise over seeds (GOOD {spread}, BAD {number(search.bad).strip()}): "
    text += "there is no cause to look for"
    if None not in ends and not noise.hides(noise.mean + ends[1] - ends[0]):
        text += f"; at step {end} the records differ by more, {ends[0]:.4g} and {ends[1]:.4g}: try --steps {end}"
    return 1, text, []


def main(argv: list[str]) -> int:
    """Compare the records, measure the noise, search. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bisect", description=(__doc__ or "").partition("\n\n")[2])
    for name in ("good", "bad"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="folder of a run")
    parser.add_argument("--metric", help="as val.loss or train.loss; default: the one that chooses the best checkpoint")
    parser.add_argument("--steps", type=int, help="length of a run; default: until the two records differ clearly")
    parser.add_argument("--seeds", type=int, default=4, choices=range(2, 21), metavar="N", help="of GOOD; default 4")
    parser.add_argument("--folder", type=Path, help="keeps results; default: bisect_GOOD_BAD beside BAD")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    for number_ in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number_, signal.default_int_handler)
    good, bad = Recorded.read(options.good), Recorded.read(options.bad)
    metric = options.metric or default_metric(good, bad)
    step, is_clear = (options.steps, True) if options.steps else first_clear_step(good, bad, metric)
    folder = options.folder or bad.files.path.parent / f"bisect_{good.files.name}_{bad.files.name}"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bisect-") as scratch:
        trials = Trials(good, bad, metric, step, folder / "results.jsonl", Path(scratch))
        values = " and ".join("none" if value is None else number(value).strip()
                              for value in (good.value(metric, step), bad.value(metric, step)))  # fmt: skip
        why = f"where the records have {values}" + ("" if is_clear else ", which is not clearly different")
        print(announce(trials, options.seeds, why, folder), file=sys.stderr)
        search = Search(trials, options.seeds)
        code, text, causes = conclude(search)
        if options.json:
            text = json.dumps(report(search, code, text, causes))
    print(text)
    return code


def report(search: Search, code: int, text: str, causes: Sequence[Cause]) -> dict[str, Any]:
    """Return the result as plain data."""
    found = [
        {
            "settings": {each.key: [each.old, each.new] for name in cause.settings for each in search.settings[name]},
            "code": [search.points[step + 1].step for step in cause.steps],
            "with": search.values[cause.present],
            "without": search.values[cause.absent],
        }
        for cause in causes
    ]
    noise = {"mean": search.noise.mean, "deviation": search.noise.deviation}
    about = {"metric": search.trials.metric, "step": search.trials.step, "noise": noise, "bad": search.bad}
    return plain({"found": found, "conclusion": text, "code": code, "runs": search.runs, **about})


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
