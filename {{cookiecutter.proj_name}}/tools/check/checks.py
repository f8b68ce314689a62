"""The checks of tools.check: which runs each one compares, and when it does not apply."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from common.base.errors import UserError
from common.config.names import join_names
from tools.check.causes import Suspect, suspects, unsaved
from tools.check.lab import SAMPLES, STEPS, Finding, Lab, same_bits, same_numbers

_CLOSE = {"rel_tol": 1e-8, "abs_tol": 1e-12}
FIRST, SECOND = 2, STEPS // 2 + 1  # steps after which runs are stopped: in the first epoch, and in the second


class NotApplicable(Exception):
    """Why a check does not apply."""


@dataclass
class Result:
    """The outcome of a check: "holds", "fails" or "not applicable"."""

    name: str
    title: str
    outcome: str
    finding: Finding
    suspects: list[Suspect] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """The result for JSON."""
        found = self.finding
        tensor = f"{found.kind} {found.name}" if found.name else None
        rest = {"step": found.step, "tensor": tensor, "why": found.why, "suspects": [asdict(s) for s in self.suspects]}
        return {"name": self.name, "title": self.title, "outcome": self.outcome, **rest}


@dataclass(frozen=True)
class Check:
    """A guarantee. `compare` makes the runs; it returns None if it holds, or raises `NotApplicable`."""

    name: str
    title: str
    runs: int
    compare: Callable[[Lab], Finding | None]

    def result(self, lab: Lab, repeats: bool | None) -> Result:
        """Make the runs, and look for causes if the guarantee does not hold. `repeats`: see `suspects`."""
        try:
            found = self.compare(lab)
        except NotApplicable as reason:
            return Result(self.name, self.title, "not applicable", Finding(str(reason)))
        except UserError as error:  # a run that should end did not
            why = next((line.strip() for line in reversed(str(error).splitlines()) if "Error: " in line), str(error))
            places = re.findall(r'File "(?:.*/)?([\w-]+/[\w./-]+)", line (\d+)', str(error))
            notes = {note["file"] for note in lab.notes() if note["kind"] == "module"}
            own = [Suspect(file, int(line), "the error is raised here") for file, line in places if file in notes][-1:]
            causes = own or suspects(self.name, "", "", lab.notes(), repeats)
            return Result(self.name, self.title, "fails", Finding(f"a run ended with {why}"), causes)
        if found is None:
            changes = unsaved(lab.notes()) if self.name == "resume" else []
            why = "in these steps, this makes no difference:" if changes else ""
            return Result(self.name, self.title, "holds", Finding(why), changes)
        causes = suspects(self.name, found.kind, found.name, lab.notes(), repeats)
        return Result(self.name, self.title, "fails", found, causes)


def cut(name: str, *signals: str, damaged: bool = False) -> Callable[[Lab], Finding | None]:
    """Return a comparison of the uncut run with one that gets these signals, and is resumed after each."""
    return lambda lab: same_bits(lab.train("uncut"), lab.cut(name, *signals, damaged=damaged))


def seed(lab: Lab) -> Finding | None:
    """Repeat the run, with other hashes, and with folders listed backwards."""
    return same_bits(lab.train("uncut"), lab.train("seed", PYTHONHASHSEED="2", CHECK_LISTING="reversed"))


def workers(lab: Lab) -> Finding | None:
    """Read the data by two workers."""
    if lab.facts["in_step"]:
        raise NotApplicable(f"{lab.facts['data']} is read in step with the training (reads_in_step), without workers")
    if lab.facts["shares"]:
        raise NotApplicable(f"{lab.facts['data']} gives each reader a share of its own, so the order depends on them")
    return same_bits(lab.train("uncut"), lab.train("workers", {"--num_workers": "2"}))


def accumulate(lab: Lab) -> Finding | None:
    """Divide the samples of a step into three micro-batches."""
    whole = lab.plain("plain", batch_size=f"{SAMPLES}", optim__accumulate="1")
    parts = lab.plain("accumulate", batch_size=f"{SAMPLES // 3}", optim__accumulate="3")
    return apart_from_batches(lab, same_numbers(whole, parts))


def processes(lab: Lab) -> Finding | None:
    """Divide the samples of a step among two and three processes."""
    if lab.facts["shares"]:
        raise NotApplicable(f"{lab.facts['data']} gives each process a share of its own, so the order depends on them")
    one, found = lab.plain("plain", batch_size=f"{SAMPLES}", optim__accumulate="1"), None
    for count in (2, 3):
        size = {"batch_size": f"{SAMPLES // count}", "optim__accumulate": "1"}
        more = lab.plain(f"{count}_processes", **size, dist__launcher="auto", dist__processes=f"{count}", gpu_ids="-1")
        found = found or same_numbers(one, more)
    return apart_from_batches(lab, found)


def evaluation(lab: Lab) -> Finding | None:
    """Evaluate the last checkpoint in other batches, and on two processes."""
    if not (lab.config.dataset.val or lab.config.dataset.eval):
        raise NotApplicable("the config has no data for an evaluation")
    lab.train("uncut")
    whole, metrics = lab.evaluate("evaluation", 31, 1), set(lab.config.metric or ())
    for size, processes in ((7, 1), (7, 2)):
        other = lab.evaluate(f"evaluation_{size}_{processes}", size, processes)
        pairs = {name: (whole.get(name, math.inf), other.get(name, math.inf)) for name in sorted({*whole, *other})}
        wrong = [name for name, (a, b) in pairs.items() if not (math.isclose(a, b, **_CLOSE) or (a != a and b != b))]
        if wrong:
            is_metric = {name: not metrics.isdisjoint(name.split(".")) for name in wrong}
            kind = "value" if all(is_metric.values()) else "output" if any(is_metric.values()) else "loss"
            first, (a, b) = wrong[0], pairs[wrong[0]]
            text = f"{first} is {a} in batches of 31, and {b} in batches of {size} on {processes} process(es)"
            return Finding(text, STEPS, f"merged {kind}" if processes > 1 and kind == "value" else kind, first)
    return None


def apart_from_batches(lab: Lab, found: Finding | None) -> Finding | None:
    """Return a difference. Raise `NotApplicable` if it must be there, or if a batch norm would make one."""
    facts, rows = lab.facts, lab.records["plain"].ranks[0].items()
    if facts["compares"]:
        raise NotApplicable(f"{join_names(facts['compares'])} compares the samples of a batch")
    if found and len({row["digest"] for (_, kind, name), row in rows if (kind, name) == ("random", "torch")}) > 1:
        raise NotApplicable("a step draws random numbers, not in dropout layers: others on each process")
    if found is None and facts["norms"]:
        norms = join_names(facts["norms"], 2)
        raise NotApplicable(f"{norms}: statistics of the batch of one process; with the running ones instead, it holds")
    return found


CHECKS = [
    Check("resume", "stopped by SIGTERM and resumed = uncut", 2, cut("resume", f"SIGTERM@{FIRST}")),
    Check("kill", "killed by SIGKILL and resumed = uncut", 2, cut("kill", f"SIGKILL@{SECOND}")),
    Check("twice", "stopped and resumed twice = uncut", 3, cut("twice", f"SIGTERM@{FIRST}", f"SIGTERM@{SECOND + 1}")),
    Check("damaged", "resumed with a damaged latest.pt = uncut", 2, cut("damaged", f"SIGKILL@{SECOND}", damaged=True)),
    Check("workers", "2 loader workers = none", 1, workers),
    Check("seed", "the same seed twice", 1, seed),
    Check("accumulate", "1 x 12 samples = 3 x 4, in fp64", 2, accumulate),
    Check("processes", "1 process = 2 = 3, in fp64", 3, processes),
    Check("evaluation", "evaluation in any batches, on 1 or 2 processes", 3, evaluation),
]
