"""The checks of tools.check: which runs each one compares, and when it does not apply."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from common.base.errors import UserError
from common.config.problem import join_names
from tools.check.lab import SAMPLES, STEPS, Lab, NotApplicable, same_bits, same_numbers
from tools.same.folders import equal

_CLOSE = {"rel_tol": 1e-8, "abs_tol": 1e-12}
FIRST, SECOND = 2, STEPS // 2 + 1  # steps after which runs are stopped: in the first epoch, and in the second


HOLDS, FAILS, DOES_NOT_APPLY = "holds", "does NOT hold", "does not apply"


@dataclass(frozen=True)
class Check:
    """A guarantee. `compare` makes the runs; it returns how they differ, "" if not, or raises `NotApplicable`."""

    name: str
    title: str
    compare: Callable[[Lab], str]

    def result(self, lab: Lab) -> tuple[str, list[str]]:
        """Make the runs. Returns the outcome in words, and why, unless the guarantee holds."""
        try:
            found = self.compare(lab)
        except NotApplicable as reason:
            return DOES_NOT_APPLY, [str(reason)]
        except UserError as error:  # a run that should end did not
            return FAILS, [str(error)]
        return (FAILS, [found]) if found else (HOLDS, [])


def cut(name: str, *signals: str) -> Callable[[Lab], str]:
    """Return a comparison of the uncut run with one that gets these signals, and is resumed after each."""
    return lambda lab: same_bits(lab.train("uncut"), lab.cut(name, *signals))


def seed(lab: Lab) -> str:
    """Repeat the run, with other hashes."""
    return same_bits(lab.train("uncut"), lab.train("seed", PYTHONHASHSEED="2"))


def workers(lab: Lab) -> str:
    """Read the data by two workers."""
    if lab.facts["in_step"]:
        raise NotApplicable(f"{lab.facts['data']} is read in step with the training (reads_in_step), without workers")
    if lab.facts["shares"]:
        raise NotApplicable(f"{lab.facts['data']} gives each reader a share of its own, so the order depends on them")
    # Where a stream stands is saved only if the main process reads it.
    return same_bits(lab.train("uncut"), lab.train("workers", {"--num_workers": "2"}), skip=("data.states",))


def accumulate(lab: Lab) -> str:
    """Divide the samples of a step into three micro-batches."""
    whole, parts = lab.split("plain", SAMPLES), lab.split("accumulate", SAMPLES // 3, accumulate=3)
    return apart_from_batches(lab, same_numbers(whole, parts))


def processes(lab: Lab) -> str:
    """Divide the samples of a step among two and three processes."""
    if lab.facts["shares"]:
        raise NotApplicable(f"{lab.facts['data']} gives each process a share of its own, so the order depends on them")
    whole = lab.split("plain", SAMPLES)
    parts = [lab.split(f"{count}_processes", SAMPLES // count, processes=count) for count in (2, 3)]
    return apart_from_batches(lab, same_numbers(whole, parts[0]) or same_numbers(whole, parts[1]))


def evaluation(lab: Lab) -> str:
    """Evaluate the last checkpoint in other batches, and on two processes."""
    if not (lab.config.dataset.val or lab.config.dataset.eval):
        raise NotApplicable("the config has no data for an evaluation")
    a = lab.evaluate("evaluation", 31, 1)
    for size, count in ((7, 1), (7, 2)):
        b = lab.evaluate(f"evaluation_{size}_{count}", size, count)
        wrong = [name for name in a if not (equal(a[name], b[name]) or math.isclose(a[name], b[name], **_CLOSE))]
        if wrong:
            name = wrong[0]
            return f"{name} is {a[name]} in batches of 31, and {b[name]} in batches of {size} on {count} process(es)"
    return ""


def apart_from_batches(lab: Lab, finding: str) -> str:
    """Return how steps that are split in two ways differ.

    Raise `NotApplicable` if they must, or if a batch norm would.
    """
    facts, rows = lab.facts, lab.records["plain"].ranks[0].items()
    if facts["compares"]:
        raise NotApplicable(f"{join_names(facts['compares'])} compares the samples of a batch")
    if finding and facts["collates"]:
        raise NotApplicable("the collate function may make entries of several samples, which depend on the micro-batch")
    states = {row["digest"] for (_, kind, name), row in rows if (kind, name) == ("random", "torch")}
    if finding and len(states) > 1:
        raise NotApplicable("a step draws random numbers, not in dropout layers: different ones on each process")
    if not finding and facts["norms"]:
        norms = join_names(facts["norms"], 2)
        raise NotApplicable(f"{norms}: statistics of the batch of one process; with the running ones instead, it holds")
    return finding


CHECKS = [
    Check("seed", "the same seed twice", seed),
    Check("resume", "stopped by SIGTERM and resumed = uncut", cut("resume", f"SIGTERM@{FIRST}")),
    Check("kill", "killed by SIGKILL and resumed = uncut", cut("kill", f"SIGKILL@{SECOND}")),
    Check("twice", "stopped and resumed twice = uncut", cut("twice", f"SIGTERM@{FIRST}", f"SIGTERM@{SECOND + 1}")),
    Check("workers", "2 loader workers = none", workers),
    Check("accumulate", "1 x 12 samples = 3 x 4, in fp64", accumulate),
    Check("processes", "1 process = 2 = 3, in fp64", processes),
    Check("evaluation", "evaluation in any batches, on 1 or 2 processes", evaluation),
]
