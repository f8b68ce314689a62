"""Find the key or the commit that makes two runs differ: python -m tools.bisect GOOD BAD

Trains short runs with some settings and some commits of each. Exit code 0: found; 1: the difference is within the noise
over seeds, or in nothing that a run can change; 2: it cannot be searched for.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.base.errors import UserError
from common.base.text import number, to_json
from common.failure.program import report_errors
from tools.bisect.runs import Recorded, Trials, default_metric, differing_environment, first_clear_step
from tools.bisect.search import Cause, Noise, Trial, find_causes, most_runs


class Search:
    """Measures the noise over seeds, then searches; says each run as it ends, on stderr.

    Attributes:
        values: of all trials so far; None for one that does not run.
        runs: how many trials the search has taken, besides those of the noise and of BAD.
    """

    def __init__(self, trials: Trials, seeds: int) -> None:
        self.trials, self.settings, self.points, self.runs = trials, trials.settings, trials.points, 0
        self.values: dict[Trial, float | None] = {}
        self.worst = Trial(frozenset(self.settings), len(self.points) - 1)
        most, first = most_runs(len(self.settings), self.worst.point), trials.good.start["seed"]
        _say(
            f"runs      {seeds} of GOOD for the noise, 1 of BAD, then at most {most} if a single change is to be found"
        )
        values = [self.reference(f"GOOD, seed {first}", Trial())]
        left = trials.result(Trial()).seconds * (seeds + most) / 60
        _say(f"          ({trials.result(Trial()).seconds:.0f} s each: about {left:.0f} minutes more)")
        values += [self.reference(f"GOOD, seed {seed}", Trial(seed=seed)) for seed in range(first + 1, first + seeds)]
        self.noise = Noise(values)
        self.bad = self.reference(f"BAD, seed {first}", self.worst)

    def reference(self, what: str, trial: Trial) -> float:
        """Return a value that others are compared with. Raises `UserError` if the run has none."""
        value = self._run(trial, what)
        if value is None or (value != value and what.startswith("GOOD")):
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
        value, note, seconds = self.trials.result(trial)
        self.values[trial] = value
        verdict = {None: "skipped", True: "bad", False: "good"}[self.is_bad(trial)] if count else ""
        shown = "" if value is None else number(value)
        _say(f"{count or '':>3} {shown:>9} {verdict:<7} {seconds:5.1f} s  {what}{note and f' ({note})'}")
        return value

    def describe(self, trial: Trial) -> str:
        """Return a trial in words: whose settings, whose code."""
        taken, left = ([key for key in self.settings if (key in trial.settings) is has] for has in (True, False))
        few = f"BAD's settings, but GOOD's {_listed(left)}" if left else "BAD's settings"
        if len(taken) <= len(left):
            few = f"GOOD's settings, but BAD's {_listed(taken)}" if taken else "GOOD's settings"
        code = {0: "GOOD's code", self.worst.point: "BAD's code"}.get(trial.point)
        code = code or f"code of {self.points[trial.point].step}"
        code += "".join(f", without {self.points[step + 1].step}" for step in sorted(trial.without))
        return "; ".join([few] * bool(self.settings) + [code] * (len(self.points) > 1))

    def explain(self, cause: Cause) -> str:
        """Return a cause in words, with the values that prove it."""
        names = [key.arrow for name, keys in self.settings.items() if name in cause.present.settings for key in keys]
        steps = [f"{self.points[step + 1].step} ({_listed(self.trials.copies.changed(step))})" for step in cause.steps]
        names += steps if len(steps) < 2 else [f"one of these, which no run tells apart: {'; '.join(steps)}"]
        text = f"{' and '.join(names)} make{'s' * (len(names) == 1)} the difference: {self.trials.metric} is "
        text += f"{_number(self.values[cause.present])} with it"
        if cause.steps:
            before = replace(cause.present, point=cause.steps.start, without=cause.present.without - {*cause.steps})
            text += f", {_number(self.values.get(before))} just before it"
        without = self.values[cause.absent]
        return f"{text}; BAD without it " + ("gives no value" if without is None else f"has {_number(without)}")


def announce(trials: Trials, file: Path) -> None:
    """Say what differs, and what will be measured."""
    good, bad, steps = trials.good, trials.bad, [point.step for point in trials.points[1:]]
    commits = sum("uncommitted" not in step for step in steps)
    _say(f"differ    {len(trials.settings)} settings, {commits} commits, uncommitted changes: "
         f"{'yes' if len(steps) > commits else 'no'}, seeds {good.start['seed']} and {bad.start['seed']}")  # fmt: skip
    _say(f"          and what no run here can change: {'; '.join(differing_environment(good, bad)) or 'nothing'}")
    recorded = [run.value(trials.metric, trials.step) for run in (good, bad)]
    _say(f"measure   {trials.metric} after step {trials.step}; recorded: {' and '.join(map(_number, recorded))}")
    _say(f"          results are kept in {file}: the same command continues")


def conclude(search: Search, last: int) -> tuple[int, list[Cause], str]:
    """Search, if there is something to find. Returns the exit code, the causes, and the conclusion.

    Args:
        last: the last step that both runs have measured.
    """
    good, bad, metric, noise = search.trials.good, search.trials.bad, search.trials.metric, search.noise
    spread = f"GOOD has {_number(noise.mean)} +- {_number(noise.deviation)} over seeds"
    if not noise.hides(search.bad):
        causes = list(find_causes([*search.settings], search.worst.point, search.is_bad))
        more = "\nthis is not all: BAD without it is still bad" * bool(search.is_bad(causes[-1].absent))
        return 0, causes, "\n".join(map(search.explain, causes)) + more + f"\n{search.runs} runs; {spread}"
    if (seed := bad.start["seed"]) != good.start["seed"]:
        own = search.reference(f"BAD, seed {seed}", replace(search.worst, seed=seed))
        if not noise.hides(own):
            return 0, [], f"seed {seed} makes the difference: BAD has {_number(own)} with it; {spread}"
    recorded = [run.value(metric, search.trials.step) for run in (good, bad)]
    if any(value is not None and not noise.hides(value) for value in recorded):
        other = "; ".join(differing_environment(good, bad))
        text = f"no setting and no commit: the records have {' and '.join(map(_number, recorded))}, but here {spread}, "
        text += f"BAD {_number(search.bad)}; what remains: {other or 'data, files unknown to git, chance on a GPU'}"
        return 1 - bool(other), [], text
    ends = [run.value(metric, last) or 0.0 for run in (good, bad)]
    text = f"the difference is within the noise over seeds: {spread}, BAD {_number(search.bad)}; no cause to look for"
    later = not noise.hides(noise.mean + ends[1] - ends[0])
    return 1, [], text + f"\nthe records differ by more at step {last}: --steps {last}" * later


def main(argv: list[str]) -> int:
    """Compare the records, measure the noise, search. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bisect", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("good", type=Path, metavar="GOOD", help="folder of a run")
    parser.add_argument("bad", type=Path, metavar="BAD", help="folder of another run")
    parser.add_argument("--metric", help="as val.loss or train.loss; default: the one that chooses the best checkpoint")
    parser.add_argument("--steps", type=int, help="length of a run; default: until the two records differ clearly")
    parser.add_argument("--seeds", type=int, default=4, choices=range(2, 21), metavar="N", help="of GOOD; default: 4")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    good, bad = Recorded.read(options.good), Recorded.read(options.bad)
    metric = options.metric or default_metric(good, bad)
    step, last = first_clear_step(good, bad, metric)
    folder = bad.files.path.parent / f"bisect_{good.files.name}_{bad.files.name}"
    with tempfile.TemporaryDirectory(prefix="bisect-") as scratch:
        trials = Trials(good, bad, metric, options.steps or step, folder / "results.jsonl", Path(scratch))
        announce(trials, folder)
        search = Search(trials, options.seeds)
        code, causes, text = conclude(search, last)
        found = {search.explain(cause): [search.values[cause.present], search.values[cause.absent]] for cause in causes}
    noise = {"mean": search.noise.mean, "deviation": search.noise.deviation, "bad": search.bad, "runs": search.runs}
    result = {"conclusion": text, "found": found, "metric": metric, "step": trials.step, **noise}
    print(to_json(result) if options.json else text)
    return code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _number(value: float | None) -> str:
    return "none" if value is None else number(value).strip()


def _listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


if __name__ == "__main__":
    with report_errors():
        sys.exit(main(sys.argv[1:]))
