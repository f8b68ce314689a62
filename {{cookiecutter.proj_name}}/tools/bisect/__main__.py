"""Find the key or the commit that makes two runs differ: python -m tools.bisect GOOD BAD

Trains short runs with some settings and some commits of each. Exit code 0: it is named; 1: the difference is within the
noise over seeds, or in nothing that a run can change; 2: it cannot be searched for.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common.base.errors import UserError
from cli.program import run
from tools.bisect.runs import Recorded, Trials, show
from tools.bisect.search import Noise, Trial, find_cause
from tools.record.run import say


def announce(trials: Trials) -> None:
    """Say what differs, and what will be measured."""
    own_seeds = f"seeds {trials.good.start['seed']} and {trials.bad.start['seed']}"
    say(f"differ    {len(trials.settings)} settings, {trials.worst.point} commits and uncommitted changes, {own_seeds}")
    say(f"          and what no run here can change: {trials.environment or 'nothing'}")
    say(f"measure   {trials.metric} after step {trials.step}; recorded: {' and '.join(map(show, trials.recorded))}")


def conclude(trials: Trials, seeds: int) -> tuple[int, str]:
    """Measure the noise, and search if there is something to find. Returns the exit code and the conclusion."""
    most = math.ceil(math.log2(len(trials.settings) + trials.worst.point + 1)) + 2
    say(f"runs      {seeds} of GOOD for the noise, 1 of BAD, then at most {most} if a single change is to be found")
    start = time.monotonic()
    values = [trials.value(Trial())]
    say(f"          about {(seeds + most) * (time.monotonic() - start) / 60:.0f} minutes more, at this speed")
    values += [trials.value(Trial(seed=seed)) for seed in range(1, seeds)]
    bad = trials.value(trials.worst)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) < seeds or bad is None:
        raise UserError("GOOD with each seed, and BAD, must give a value here; the lines above say which does not")
    noise = Noise(finite)
    spread = f"GOOD has {show(noise.mean)} +- {show(noise.deviation)} over {seeds} seeds"
    if noise.hides(bad):
        return conclude_without_search(trials, noise, f"{spread}, BAD {show(bad)}")

    def is_bad(trial: Trial) -> bool | None:
        value = trials.value(trial)
        return None if value is None else noise.is_bad(value, bad)

    settings, steps = find_cause(trials.worst.point, list(trials.settings), is_bad)
    text = explain(settings, steps, trials)
    return 0, f"{text}\n{len(trials.values) - seeds - 1} runs; {spread}"


def conclude_without_search(trials: Trials, noise: Noise, values: str) -> tuple[int, str]:
    """Return the exit code and the conclusion if BAD, with GOOD's seed, is within the noise."""
    seed = trials.bad.start["seed"]
    with_seed = trials.value(Trial(trials.worst.point, trials.worst.settings, seed - trials.good.start["seed"]))
    if with_seed is not None and not noise.hides(with_seed):
        return 0, f"seed {seed} makes the difference: BAD has {show(with_seed)} with it; with GOOD's seed, {values}"
    if all(value is None or noise.hides(value) for value in trials.recorded):
        return 1, f"the difference is within the noise over seeds: {values}; there is no cause to find"
    text = f"no setting and no commit: the records have {' and '.join(map(show, trials.recorded))}, but here {values}"
    rest = trials.environment or "data, files unknown to git, chance on a GPU"
    return 0 if trials.environment else 1, f"{text}; what remains: {rest}"


def explain(settings: Sequence[str], steps: range, trials: Trials) -> str:
    """Return a cause in words, with the values that prove it: of GOOD with it, and of a run without it."""
    present, absent = Trial(steps.stop, frozenset(settings)), Trial(steps.start, frozenset(settings))
    where = "in the code before it"
    if not steps:
        absent, where = Trial(trials.worst.point, trials.worst.settings - present.settings), "in BAD without it"
    names = [change.arrow for name in settings for change in trials.settings[name]]
    commits = [trials.points[step + 1].step for step in steps]
    names += commits if len(steps) < 2 else [f"one of these, which no run can tell apart ({'; '.join(commits)})"]
    text = f"{' and '.join(names)} {'makes' if len(names) == 1 else 'make'} the difference: {trials.metric} is "
    return text + f"{show(trials.value(present))} with it, {show(trials.value(absent))} {where}"


def main(argv: list[str]) -> int:
    """Compare the records, measure the noise, search. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bisect", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("good", type=Path, metavar="GOOD", help="folder of a run")
    parser.add_argument("bad", type=Path, metavar="BAD", help="folder of another run")
    parser.add_argument("--metric", help="as val.loss or train.loss; default: the one that chooses the best checkpoint")
    parser.add_argument("--steps", type=int, help="length of a run; default: until the two records differ clearly")
    parser.add_argument("--seeds", type=int, default=4, choices=range(2, 21), metavar="N", help="of GOOD; default: 4")
    options = parser.parse_args(argv)
    good, bad = Recorded.read(options.good), Recorded.read(options.bad)
    with tempfile.TemporaryDirectory(prefix="bisect-") as folder:
        trials = Trials(good, bad, options.metric, options.steps, Path(folder))
        announce(trials)
        code, text = conclude(trials, options.seeds)
    print(text)
    return code


if __name__ == "__main__":
    run(main)
