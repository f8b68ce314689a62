"""The checks of tools.check: which runs each one compares, and when it does not apply."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.base.errors import UserError
from common.config.names import join_names
from common.data.keyed import KeyedBatches, find_collate
from common.data.sections import build_dataset
from common.data.view import is_map_style
from common.run.paths import PROJECT, data_dir
from tools.check.lab import SAMPLES, STEPS, Finding, Lab, NotApplicable, same_bits, same_numbers
from tools.check.places import Place, places
from tools.record.recorder import tensors
from tools.same.folders import equal

_CLOSE = {"rel_tol": 1e-8, "abs_tol": 1e-12}
FIRST, SECOND = 2, STEPS // 2 + 1  # steps after which runs are stopped: in the first epoch, and in the second


class Result(NamedTuple):
    """The outcome of a check: "holds", "fails" or "not applicable".

    Attributes:
        tensor: the first quantity that differs.
        places: the parts that make it.
    """

    outcome: str
    why: str = ""
    places: Sequence[Place] = ()
    step: int | None = None
    tensor: str | None = None


@dataclass(frozen=True)
class Check:
    """A guarantee. `compare` makes the runs; it returns None if it holds, or raises `NotApplicable`."""

    name: str
    title: str
    runs: int
    compare: Callable[[Lab], Finding | None]

    def result(self, lab: Lab) -> Result:
        """Make the runs; if the guarantee does not hold, say what differs first, and which code makes it."""
        try:
            finding = self.compare(lab)
        except NotApplicable as reason:
            return Result("not applicable", str(reason))
        except UserError as error:  # a run that should end did not
            return Result("fails", str(error))
        if finding is None:
            return Result("holds")
        made_by = places(lab.config, finding.kind, finding.name)
        return Result("fails", finding.why, made_by, finding.step, f"{finding.kind} {finding.name}")


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
    # Where a stream stands is saved only if the main process reads it.
    return same_bits(lab.train("uncut"), lab.train("workers", {"--num_workers": "2"}), skip=("data.states",))


def accumulate(lab: Lab) -> Finding | None:
    """Divide the samples of a step into three micro-batches."""
    whole, parts = lab.split("plain", SAMPLES), lab.split("accumulate", SAMPLES // 3, accumulate=3)
    return apart_from_batches(lab, same_numbers(whole, parts))


def processes(lab: Lab) -> Finding | None:
    """Divide the samples of a step among two and three processes."""
    if lab.facts["shares"]:
        raise NotApplicable(f"{lab.facts['data']} gives each process a share of its own, so the order depends on them")
    whole = lab.split("plain", SAMPLES)
    parts = [lab.split(f"{count}_processes", SAMPLES // count, processes=count) for count in (2, 3)]
    return apart_from_batches(lab, same_numbers(whole, parts[0]) or same_numbers(whole, parts[1]))


def evaluation(lab: Lab) -> Finding | None:
    """Evaluate the last checkpoint in other batches, and on two processes."""
    if not (lab.config.dataset.val or lab.config.dataset.eval):
        raise NotApplicable("the config has no data for an evaluation")
    a = lab.evaluate("evaluation", 31, 1)
    for size, count in ((7, 1), (7, 2)):
        b = lab.evaluate(f"evaluation_{size}_{count}", size, count)
        wrong = [name for name in a if not (equal(a[name], b[name]) or math.isclose(a[name], b[name], **_CLOSE))]
        if wrong:
            name = wrong[0]
            text = f"{name} is {a[name]} in batches of 31, and {b[name]} in batches of {size} on {count} process(es)"
            return Finding(text, STEPS, "value", name)
    return None


def apart_from_batches(lab: Lab, finding: Finding | None) -> Finding | None:
    """Return a difference. Raise `NotApplicable` if it must be there, or if a batch norm would make one."""
    facts, rows = lab.facts, lab.records["plain"].ranks[0].items()
    if facts["compares"]:
        raise NotApplicable(f"{join_names(facts['compares'])} compares the samples of a batch")
    if finding and mixes_samples(lab):
        raise NotApplicable("the collate function makes entries of several samples, so they depend on the micro-batch")
    states = {row["digest"] for (_, kind, name), row in rows if (kind, name) == ("random", "torch")}
    if finding and len(states) > 1:
        raise NotApplicable("a step draws random numbers, not in dropout layers: different ones on each process")
    if finding is None and facts["norms"]:
        norms = join_names(facts["norms"], 2)
        raise NotApplicable(f"{norms}: statistics of the batch of one process; with the running ones instead, it holds")
    return finding


def mixes_samples(lab: Lab) -> bool:
    """Return whether a batch has other entries for the same samples if another one takes the place of the last one."""
    config = lab.config
    dataset = build_dataset(config.dataset.train, "train", data_dir(config.dir, PROJECT))
    if not is_map_style(dataset) or len(dataset) < 5:
        return False
    batches = KeyedBatches(dataset, find_collate(dataset, config.loader.collate, training=True), 0)
    for epoch in range(4):  # with other random numbers each
        first, again, other = (list(tensors(batches.__getitems__((epoch, [0, 1, 2, last])), "")) for last in (3, 3, 4))
        for (_, a), (_, b), (_, c) in zip(first, again, other, strict=False):
            is_by_sample = a.ndim > 0 and len(a) == 4 and a.shape == c.shape
            if is_by_sample and torch.equal(a, b) and not torch.equal(a[:3], c[:3]):
                return True
    return False


CHECKS = [
    Check("seed", "the same seed twice", 1, seed),
    Check("resume", "stopped by SIGTERM and resumed = uncut", 2, cut("resume", f"SIGTERM@{FIRST}")),
    Check("kill", "killed by SIGKILL and resumed = uncut", 2, cut("kill", f"SIGKILL@{SECOND}")),
    Check("twice", "stopped and resumed twice = uncut", 3, cut("twice", f"SIGTERM@{FIRST}", f"SIGTERM@{SECOND + 1}")),
    Check("damaged", "resumed with a damaged latest.pt = uncut", 2, cut("damaged", f"SIGKILL@{SECOND}", damaged=True)),
    Check("workers", "2 loader workers = none", 1, workers),
    Check("accumulate", "1 x 12 samples = 3 x 4, in fp64", 2, accumulate),
    Check("processes", "1 process = 2 = 3, in fp64", 3, processes),
    Check("evaluation", "evaluation in any batches, on 1 or 2 processes", 3, evaluation),
]
