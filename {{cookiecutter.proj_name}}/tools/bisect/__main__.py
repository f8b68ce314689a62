"""Find the key or the commit that makes two runs differ: python -m tools.bisect GOOD BAD

Trains short runs with some settings and some commits of each. Exit code 0: it is named; 1: with all of them, the
difference is within the noise over seeds; 2: it cannot be searched for.
"""

import argparse
import math
import tempfile
from pathlib import Path

from common.base.errors import UserError
from cli.program import run
from tools.bisect.runs import Recorded, Trial, Trials, show
from tools.bisect.search import Noise, first_bad
from tools.record.run import say


def conclude(trials: Trials, seeds: int) -> tuple[int, str]:
    """Measure the noise, and search if there is something to find. Returns the exit code and the conclusion."""
    changes = trials.changes
    if not changes:
        raise UserError("no setting and no commit differs; if the results do: by seed, package, machine or data")
    say(f"differ    {len(trials.settings)} settings, {len(trials.points) - 1} commits and uncommitted changes")
    say(f"measure   {trials.metric} after step {trials.step}, first of GOOD with {seeds} seeds and of BAD")
    values = [trials.value(Trial(seed=seed)) for seed in range(seeds)]
    bad = trials.value(Trial(len(changes)))
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if len(finite) < seeds or bad is None:
        raise UserError("GOOD with each seed, and BAD, must give a value here; the lines above say which does not")
    noise = Noise(finite)
    spread = f"GOOD has {show(noise.mean)} +- {show(noise.deviation)} over {seeds} seeds"
    if noise.hides(bad):
        rest = "if the records differ by more, by another seed, package, machine, or data"
        return 1, f"no setting and no commit: {spread}, BAD {show(bad)}; {rest}"

    def is_bad(count: int) -> bool | None:
        value = trials.value(Trial(count))
        return None if value is None else noise.is_bad(value, bad)

    before, after = first_bad(len(changes), is_bad)
    cause = "; ".join(changes[before:after])
    if after - before > 1:
        cause = f"one of these, which no run can tell apart ({cause}),"
    present, absent = (show(trials.value(Trial(count))) for count in (after, before))
    proof = f"{trials.metric} is {present} with it, {absent} with only the changes before it"
    return 0, f"{cause} makes the difference: {proof}\n{len(trials.values) - seeds - 1} runs; {spread}"


def main(argv: list[str]) -> int:
    """Compare the records, measure the noise, search. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bisect", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("good", type=Path, metavar="GOOD", help="folder of a run")
    parser.add_argument("bad", type=Path, metavar="BAD", help="folder of another run")
    parser.add_argument("--metric", help="as val.loss or train.loss; default: the one that chooses the best checkpoint")
    parser.add_argument("--steps", type=int, help="length of a run; default: as long as both have measured it")
    parser.add_argument("--seeds", type=int, default=4, choices=range(2, 21), metavar="N", help="of GOOD; default: 4")
    options = parser.parse_args(argv)
    good, bad = Recorded.read(options.good), Recorded.read(options.bad)
    with tempfile.TemporaryDirectory(prefix="bisect-") as folder:
        trials = Trials(good, bad, options.metric, options.steps, Path(folder))
        code, text = conclude(trials, options.seeds)
    print(text)
    return code


if __name__ == "__main__":
    run(main)
