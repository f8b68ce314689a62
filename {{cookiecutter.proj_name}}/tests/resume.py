"""A run that was cut and resumed, compared with one that was never cut: nothing may differ, to the last bit."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import train
from tests.conftest import Runs, load, metrics, same
from tests.ranks import several
from tests.small import Killed

STEPS = 10  # 2 epochs of 5 steps
BASE = [
    "--dataset.train", "{type: tests.small.NoisyDigits}", "--progress.epoch_save_latest", "1step",
    "--progress.epoch_val", "0.4epoch", "--progress.log_every", "1", "--checkpoint.background", "false",
    "--loss", "{$REPLACE: true, ce: {type: tests.small.Mortal}}",
]  # fmt: skip
# Everything that has a state of its own: dropout (in the model), three kinds of augmentation, and these.
KINDS = {
    "plain": [],
    "warm-up": ["--optim.lr_scheduler", "{type: cosine, warmup: 3step}", "--optim.clip_gradients", "0.5"],
    "bf16": ["--precision.mode", "bf16"],
    "fp16": ["--precision.mode", "fp16"],
    "accumulate": ["--batch_size", "12", "--optim.accumulate", "3"],
    "momentum": ["--optim.optim_type", "SGD", "--optim.args", "{momentum: 0.9}", "--optim.lr", "0.1"],
    # Nothing is better by that much: a best that is far back, and a patience that runs.
    "early-stop": ["--early_stop.patience", "50", "--best.min_delta", "100"],
    "workers": ["--num_workers", "2"],
}


def words(kind: str, *more: str) -> list[str]:
    given = {word for word in more if word.startswith("--")}
    base = [*BASE, *KINDS[kind]]
    pairs = zip(base[::2], base[1::2], strict=True)
    return [*(word for pair in pairs if pair[0] not in given for word in pair), *more]


def final(folder: Path) -> dict[str, Any]:
    """Return all that a run ends with: the last and the best checkpoint, and every number that was measured."""
    state, best = load(folder), load(folder, "best")
    measured = [
        {key: value for key, value in entry.items() if key != "event"}
        for event in ("train", "val", "eval", "checkpoint")
        for entry in metrics(folder, event)
    ]
    for each in (state, best):
        del each["about"]
        del each["fingerprint"]["packages"]  # those imported by then: pytest's own too, or not
        del each["fingerprint"]["data"]  # how many samples were read in time
    return {"latest": state, "best": best, "measured": measured}


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    parts = [f"{file}.{part}" for file in ("latest", "best") for part in first[file]]
    values = lambda run, key: run[key.split(".")[0]][key.split(".")[1]]  # noqa: E731
    found = [key for key in parts if not same(values(first, key), values(second, key))]
    return found + (["measured"] if first["measured"] != second["measured"] else [])


def cut(runs: Runs, kind: str, at: int, *more: str, name: str = "cut") -> None:
    """Train until the training call `at`, which never returns."""
    os.environ["MORTAL_AT"] = str(at)
    try:
        with pytest.raises(Killed):
            train.main(runs.words(*words(kind, *more), name=name))
    finally:
        del os.environ["MORTAL_AT"]


def same_after_cut(
    runs: Runs, kind: str, *more: str, at: int | Sequence[int] = 8, ranks: int = 1, promised: bool = True
) -> tuple[Path, Path]:
    """Train without a stop, and cut at training call `at`, resumed: both end alike, and the log promises it.

    Returns the folders of the run that was never cut and of the one that was.

    Args:
        kind: of `KINDS`.
        more: further words for both runs.
        at: several: of the first start, and of each resume, counted anew.
        promised: whether the log must call the resume bit-exact; not of data that cannot tell where they stand.
        ranks: number of processes; with several, the first calls only try the model.
    """

    def start(name: str, *resume: str, at: int = 0) -> None:
        if ranks > 1:
            several(runs, ranks, runs.words(*words(kind, *more, *resume), name=name), at=at)
        elif at:
            cut(runs, kind, at, *more, *resume)
        else:
            runs.train(*words(kind, *more, *resume), name=name)

    uncut, resumed = runs.root / "uncut", runs.root / "cut"
    start("uncut")
    for number, call in enumerate([at] if isinstance(at, int) else at):
        start("cut", *(["--resume", "auto"] if number else []), at=call)
    start("cut", "--resume", "auto")
    assert differing(final(uncut), final(resumed)) == []
    assert not promised or "this resume is bit-exact" in (resumed / "train.log").read_text()
    return uncut, resumed


def measured(folder: Path) -> list[Any]:
    """Return what was measured and when, and the last state, without the events of a second save of the same step."""
    return [
        [load(folder, name)[part] for name in ("latest", "best") for part in ("position", "values", "owed", "model")],
        load(folder)["optimizer"],
        [(entry["step"], entry["values"]) for event in ("train", "val", "eval") for entry in metrics(folder, event)],
        (load(folder)["best"], load(folder)["schedule"], load(folder)["random"]),
    ]
