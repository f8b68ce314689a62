"""Find the key or the commit that makes two runs differ: python -m tools.bisect GOOD BAD

Trains short runs with some settings and some commits of each. Exit code 0: found; 1: the difference is within the noise
over seeds, or in nothing that a run can change; 2: it cannot be searched for.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from common.base.errors import UserError
from common.base.text import number, to_json
from common.failure.program import report_errors
from tools.bisect.runs import Recorded, Trials, default_metric, differing_environment, first_clear_step
from tools.bisect.search import Cause, Noise, Trial, find_causes, most_runs

_START_S = 6.0  # of a run, until its first step; a guess


class Search:
    """Measures the noise over seeds, then searches; says each run as it ends, on stderr.

    Attributes:
        bad: BAD's value, with GOOD's seed.
        values: of all trials so far; None for one that does not run.
        runs: how many trials the search has taken, besides those of the noise and of BAD.
    """

    def __init__(self, trials: Trials, seeds: int) -> None:
        self.trials, self.settings, self.points, self.runs = trials, trials.settings, trials.points, 0
        self.values: dict[Trial, float | None] = {}
        first = trials.good.start["seed"]
        self.noise = Noise([self.reference(f"GOOD, seed {seed}", seed) for seed in range(first, first + seeds)])
        self.worst = Trial(frozenset(self.settings), len(self.points) - 1)
        self.bad = self.reference(f"BAD, seed {first}", first, self.worst)

    def reference(self, what: str, seed: int, trial: Trial = Trial()) -> float:
        """Return a value that others are compared with. Raises `UserError` if the run has none."""
        trial = trial if seed == self.trials.good.start["seed"] else Trial(trial.settings, trial.point, seed=seed)
        value = self._run(trial, what)
        if value is None or (value != value and what[0] == "G"):
            raise UserError(f"{what} gives no value: {self.trials.result(trial).note or 'its loss is not finite'}")
        return value

    def is_bad(self, trial: Trial) -> bool | None:
        """Return whether a trial is BAD's rather than GOOD's; None if it does not run."""
        if trial not in self.values:
            self.runs += 1
            self._run(trial, self.describe(trial), self.runs)
        value = self.values[trial]
        return None if value is None else self.noise.is_bad(value, self.bad)

    def _run(self, trial: Trial, what: str, count: int = 0) -> float | None:
        result = self.trials.result(trial)
        self.values[trial] = result.value
        verdict = {None: "skipped", True: "bad", False: "good"}[self.is_bad(trial)] if count else ""
        shown, note = "" if result.value is None else number(result.value), result.note and f" ({result.note})"
        line = f"{count or '':>3} {shown:>9} {verdict:<7} {result.seconds:5.1f} s  {what}{note}"
        print(line, file=sys.stderr, flush=True)
        return result.value

    def describe(self, trial: Trial) -> str:
        """Return a trial in words: whose settings, whose code."""
        taken, left = ([key for key in self.settings if (key in trial.settings) is has] for has in (True, False))
        words = [f"GOOD's settings, but BAD's {_listed(taken)}", f"BAD's settings, but GOOD's {_listed(left)}"]
        whose = words[len(taken) > len(left)].replace(", but GOOD's none", "").replace(", but BAD's none", "")
        at = {0: "GOOD's code", self.worst.point: "BAD's code"}.get(trial.point)
        at = at or f"code of {self.points[trial.point].step}"
        at += "".join(f", without {self.points[step + 1].step}" for step in sorted(trial.without))
        return "; ".join([whose] * bool(self.settings) + [at] * (len(self.points) > 1))

    def explain(self, cause: Cause) -> str:
        """Return a cause in words, with the values that prove it."""
        names = [key.arrow for name, keys in self.settings.items() if name in cause.present.settings for key in keys]
        steps = [f"{self.points[step + 1].step} ({_listed(self.trials.copies.changed(step))})" for step in cause.steps]
        names += steps if len(steps) < 2 else [f"one of these, which no run tells apart: {'; '.join(steps)}"]
        text = f"{' and '.join(names)} make{'s' * (len(names) == 1)} the difference: {self.trials.metric} "
        text += f"{_number(self.values[cause.present])} with it, "
        if (without := self.values[cause.absent]) is None:
            return f"{text}but BAD without it does not run ({self.trials.result(cause.absent).note})"
        return f"{text}{_number(without)} in BAD without it"


def announce(trials: Trials, seeds: int, file: Path) -> str:
    """Return what differs, what will be measured, and how many runs that takes."""
    good, bad, steps, step = trials.good, trials.bad, len(trials.points) - 1, trials.step
    commits = sum("uncommitted" not in point.step for point in trials.points[1:])
    other = differing_environment(good, bad)
    pace = median([row["step_seconds"] for row in good.files.measured("speed").values()] or [0.0])
    most, length = most_runs(len(trials.settings), steps), _START_S + pace * step
    return "\n".join([
        f"differ    {len(trials.settings)} settings, {commits} commits, uncommitted changes: "
        f"{'yes' if steps > commits else 'no'}, seeds {good.start['seed']} and {bad.start['seed']}",
        f"          and what no run here can change: {'; '.join(other) or 'nothing'}",
        f"measure   {trials.metric} after step {step}; recorded: "
        f"{' and '.join(_number(run.value(trials.metric, step)) for run in (good, bad))}",
        f"runs      {seeds} of GOOD for the noise, 1 of BAD, at most {most} to find a single change: about "
        f"{(seeds + 1 + most) * length / 60:.0f} minutes; results are kept in {file}",
    ])  # fmt: skip


def conclude(search: Search, last: int) -> tuple[int, list[Cause], str]:
    """Search, if there is something to find. Returns the exit code, the causes, and the conclusion.

    Args:
        last: the last step that both runs have measured.
    """
    trials, noise = search.trials, search.noise
    good, bad, metric = trials.good, trials.bad, trials.metric
    spread = f"GOOD has {_number(noise.mean)} +- {_number(noise.deviation)} over seeds"
    if not noise.hides(search.bad):
        causes = list(find_causes([*search.settings], search.worst.point, search.is_bad))
        return 0, causes, "\n".join([*map(search.explain, causes), f"{search.runs} runs; {spread}"])
    if (seed := bad.start["seed"]) != good.start["seed"]:
        own = search.reference(f"BAD, seed {seed}", seed, search.worst)
        if not noise.hides(own):
            return 0, [], f"seed {seed} makes the difference: {metric} {_number(own)} with it in BAD; {spread}"
    recorded = [run.value(metric, trials.step) for run in (good, bad)]
    if any(value is not None and not noise.hides(value) for value in recorded):
        other = "; ".join(differing_environment(good, bad))
        return 1 - bool(other), [], (
            f"no setting or commit: {' and '.join(map(_number, recorded))} in the records, but here {spread}, "
            f"and BAD {_number(search.bad)}. What remains: {other or 'data, files unknown to git, chance on a GPU'}"
        )
    ends = [run.value(metric, last) or 0.0 for run in (good, bad)]
    later = f"; the records differ by more at step {last}: --steps {last}" * (not noise.hides(noise.mean + ends[1] - ends[0]))
    return 1, [], f"within the noise over seeds: {spread}, BAD {_number(search.bad)}; no cause to look for{later}"


def main(argv: list[str]) -> int:
    """Compare the records, measure the noise, search. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bisect", description=(__doc__ or "").partition("\n\n")[2])
    for name in ("good", "bad"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="folder of a run")
    parser.add_argument("--metric", help="as val.loss or train.loss; default: the one that chooses the best checkpoint")
    parser.add_argument("--steps", type=int, help="length of a run; default: until the two records differ clearly")
    parser.add_argument("--seeds", type=int, default=4, choices=range(2, 21), metavar="N", help="of GOOD; default: 4")
    parser.add_argument("--folder", type=Path, help="keeps the results; default: bisect_GOOD_BAD beside BAD")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    good, bad = Recorded.read(options.good), Recorded.read(options.bad)
    metric = options.metric or default_metric(good, bad)
    step, last = first_clear_step(good, bad, metric)
    folder = options.folder or bad.files.path.parent / f"bisect_{good.files.name}_{bad.files.name}"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bisect-") as scratch:
        trials = Trials(good, bad, metric, options.steps or step, folder / "results.jsonl", Path(scratch))
        print(announce(trials, options.seeds, folder), file=sys.stderr)
        search = Search(trials, options.seeds)
        code, causes, text = conclude(search, last)
        found = [[sorted(cause.present.settings), [search.points[step + 1].step for step in cause.steps],
                  search.values[cause.present], search.values[cause.absent]] for cause in causes]  # fmt: skip
    names = ("settings", "code", "with", "without")
    about = {"metric": metric, "step": trials.step, "mean": search.noise.mean, "deviation": search.noise.deviation}
    about |= {"bad": search.bad, "found": [dict(zip(names, each, strict=True)) for each in found]}
    print(to_json({"conclusion": text, "runs": search.runs, **about}) if options.json else text)
    return code


def _number(value: float | None) -> str:
    return "none" if value is None else number(value).strip()


def _listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most) or "none"


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
