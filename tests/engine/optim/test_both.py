"""`optim.ema.evaluate: both`: the average and the weights themselves, measured side by side."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint.weights import averaged_state_dict
from tests.conftest import Runs, load, metrics, same
from tests.ranks import several

Evaluated = Callable[..., dict[str, Any]]
BOTH = ["--optim.ema", "{decay: 0.8, evaluate: both}", "--optim.lr", "0.01"]


def values(folder: Path, event: str = "val") -> list[dict[str, float]]:
    return [row["values"] for row in metrics(folder, event)]


def own(measured: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("weights."): value for name, value in measured.items() if name.startswith("weights.")}


def test_both_are_measured_and_training_stays_the_same(runs: Runs) -> None:
    """Each as a run that measures it alone does; in the log, in metrics.jsonl, and in the run's eval folder."""
    both = runs.train(*BOTH, "--progress.epoch_eval", "1", name="both")
    average = runs.train(*BOTH[:1], "{decay: 0.8}", *BOTH[2:], "--progress.epoch_eval", "1", name="average")
    plain = runs.train(*BOTH[2:], "--progress.epoch_eval", "1", name="plain")
    for event in ("val", "eval"):
        for mine, averaged, without in zip(*(values(run, event) for run in (both, average, plain)), strict=True):
            assert mine == averaged | {f"weights.{name}": value for name, value in without.items()}
            assert averaged != without
    assert same(load(both)["model"], load(plain)["model"])
    log = (both / "train.log").read_text()
    assert "val   1/" in log and "val.weights 1/" in log
    assert "weights.Accuracy" in next((both / "eval").glob("*/metrics.json")).read_text()


@pytest.mark.parametrize("metric", ["loss", "weights.loss", "weights.Accuracy"])
def test_the_best_of_either(runs: Runs, evaluated: Evaluated, metric: str) -> None:
    """best.pt is chosen by what best.metric names, and evaluate.py, export and init_from use those weights."""
    folder = runs.train(*BOTH, "--best.metric", metric, "--progress.epoch_val", "1step")
    best = load(folder, "best")
    assert best["best"]["best"][0] == best["values"][metric]
    chosen = [row[metric] for row in values(folder)]
    assert best["values"][metric] == (max if metric == "weights.Accuracy" else min)(chosen)
    found = evaluated(folder / "checkpoints" / "best.pt", "--split", "val")["values"]
    both = [best["values"]["loss"], best["values"]["weights.loss"]]
    assert found["loss"] == both[metric.startswith("weights.")] and both[0] != both[1]
    used = averaged_state_dict(best["model"], best["ema"])
    assert same(used, best["model"]) == metric.startswith("weights.")


def test_sets_with_names(runs: Runs) -> None:
    """`weights.`, then the name of the set, then that of the value."""
    sets = "{$REPLACE: true, near: {type: DigitsDataset}, far: {type: DigitsDataset, shift: 2}}"
    folder = runs.train(*BOTH, "--dataset.val", sets, "--best.metric", "weights.far.loss", "--progress.epoch", "1")
    names = values(folder)[0].keys()
    assert {"near.loss", "far.Accuracy", "weights.near.loss", "weights.far.loss"} <= names
    assert load(folder)["best"]["best"][0] == values(folder)[0]["weights.far.loss"]


def test_a_resume_goes_on_with_both(runs: Runs) -> None:
    """Stopped between two epochs, with a rate that follows the weights' own loss."""
    words = [*BOTH, "--best.metric", "weights.loss", "--optim.lr_scheduler", "{type: plateau, patience: 0}"]
    uncut = runs.train(*words, name="uncut")
    cut = runs.train(*words, "--progress.max_steps", "7", name="cut")
    runs.train(*words, "--resume", str(cut), name="cut")
    for part in ("model", "ema", "best", "schedule"):
        assert same(load(uncut)[part], load(cut)[part]), part


@pytest.mark.slow
def test_both_on_two_processes(runs: Runs) -> None:
    """The values of one process; statistics that differ between ranks are put back after each measurement."""
    words = [*BOTH, "--model", "{type: tests.small.Plain}", "--precision.mode", "fp64"]
    one = runs.train(*words, "--batch_size", "32", name="one")
    several(runs, 2, runs.words(*words, "--batch_size", "16", name="two"))
    for first, second in zip(values(one), values(runs.root / "two"), strict=True):
        assert first == pytest.approx(second, rel=1e-9)
    norms = ["--batch_size", "16", "--dist.broadcast_buffers", "false", "--optim.lr", "0.01", "--optim.ema"]
    several(runs, 2, runs.words(*norms, "{decay: 0.8}", name="average"))
    several(runs, 2, runs.words(*norms, "{decay: 0.8, evaluate: both}", name="both"))
    assert same(load(runs.root / "average")["model"], load(runs.root / "both")["model"])
    assert torch.equal(*(load(runs.root / name)["random"][1]["torch"] for name in ("average", "both")))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--optim.ema.evaluate", "both"], "optim.ema.evaluate = 'both'"),
        ([*BOTH, "--best.metric", "weights.los"], "best.metric = 'los'"),
        (["--optim.ema.decay", "0.9", "--best.metric", "weights.loss"], "is neither a loss"),
        (["--optim.ema", "{decay: 0.9, evaluate: own}"], "must be 'average' or 'both'"),
    ],
)
def test_mistakes(runs: Runs, words: list[str], says: str) -> None:
    """Found before anything is built."""
    with pytest.raises(Exception, match=says):
        runs.fail(*words)
