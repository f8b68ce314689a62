"""Which checkpoint is the best one, and which direction is better."""

import json
import math
from typing import Any

import pytest
from torch import Tensor

from common.evaluation.best import BestConfig, BestTracker, EarlyStopConfig
from common.evaluation.metric import GatheredMetric
from tests.conftest import ErrorOf, Runs, load, metrics


class Silent(GatheredMetric):
    """A metric that does not say what is better; the value falls from pass to pass."""

    def results(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Any]:
        return {"label": batch["label"]}

    def compute(self, results: dict[str, Any]) -> Any:
        return float(len(results["label"]))


class Costs(Silent):
    """Of each of its values less is better."""

    higher_is_better = False

    def compute(self, results: dict[str, Any]) -> Any:
        return {"time": 1.0, "money": 2.0}


SILENT = ["--metric", "{mine: {type: engine.evaluation.test_best.Silent}}"]
COSTS = ["--metric", "{mine: {type: engine.evaluation.test_best.Costs}}"]


def test_a_metric_says_that_more_is_better(runs: Runs) -> None:
    """Nothing else has to be set; early stop counts in the same direction."""
    words = ["--best.metric", "Accuracy", "--optim.lr", "0.02", "--progress.epoch", "6", "--early_stop.patience", "4"]
    folder = runs.train(*words)
    values = [(entry["values"]["Accuracy"], entry["step"]) for entry in metrics(folder, "val")]
    assert len(values) == 6  # always worse than the first, it would have ended here
    assert max(value for value, _ in values) > values[0][0]
    assert load(folder, "best")["position"]["step"] == max(values, key=lambda each: (each[0], -each[1]))[1]


def test_what_is_never_the_best() -> None:
    """A number that is not finite, and of two equal ones the newer."""
    tracker = BestTracker(BestConfig(), EarlyStopConfig(), "min")
    values = [math.nan, 2.0, 2.0, -math.inf, 1.0]
    assert [tracker.update({"loss": value}, step) for step, value in enumerate(values)] == [0, 1, 0, 0, 1]
    assert tracker.best is not None and (tracker.best.value, tracker.best.step, tracker.waited) == (1.0, 4, 0)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--best.metric", "Accuracy", "--best.mode", "min"], "higher values of Accuracy are better"),
        (["--best.mode", "max"], "lower values of loss are better"),
        ([*SILENT, "--best.metric", "mine"], "set best.mode to min or max, or higher_is_better in the class"),
        ([*COSTS, "--best.metric", "mine.time", "--best.mode", "max"], "lower values of mine.time are better"),
        (
            ["--loss.off", "{type: CrossEntropyLoss, weight: 0}", "--best.metric", "off"],
            "is neither a loss with a weight other than 0 nor a metric",
        ),
    ],
)
def test_a_direction_that_is_not_known_or_wrong(error_of: ErrorOf, words: list[str], text: str) -> None:
    """Before anything is built: it would keep the worst model, or fail at the first validation."""
    assert text in error_of(*words)


@pytest.mark.parametrize(
    "words",
    [
        [*SILENT, "--best.metric", "mine", "--best.mode", "min"],
        [*COSTS, "--best.metric", "mine.time"],
        ["--best.metric", "Accuracy", "--optim.lr_scheduler.type", "plateau"],
    ],
)
def test_a_direction_that_is_known(runs: Runs, words: list[str]) -> None:
    folder = runs.train(*words, "--progress.epoch", "1")
    assert load(folder)["best"]["mode"] == ("min" if "mine.time" in words or "min" in words else "max")


@pytest.mark.parametrize("words", [["--early_stop.patience", "2"], ["--optim.lr_scheduler.type", "plateau"]])
@pytest.mark.parametrize("without", [["--progress.epoch_val", "-1"], ["--dataset.val", "null"]])
def test_nothing_to_compare(error_of: ErrorOf, words: list[str], without: list[str]) -> None:
    """Without a validation, these settings would do nothing."""
    assert "there is no validation to compare" in error_of(*words, *without)


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["--optim.lr_scheduler.type", "plateau"], ("schedule",)),
        (["--stages", "[{until: plateau, patience: 50}, {}]"], ("stages", "plateau")),
    ],
)
def test_a_plateau_of_another_metric(runs: Runs, words: list[str], place: tuple[str, ...]) -> None:
    """A resume with another `best.metric` does not compare it with the best value of the one before."""
    runs.train(*words, "--progress.epoch", "1")
    changed = ["--best.metric", "Accuracy", "--allow_changes", "true", "--progress.epoch", "2", "--resume", "auto"]
    folder = runs.train(*words, *changed)
    state: Any = load(folder)
    assert state["best"]["metric"] == "Accuracy"
    best = state["best"]["best"][0]
    for name in place:
        state = state[name]
    assert state["best"] == best and "early stopping and plateaus restart" in (folder / "train.log").read_text()


def test_each_evaluation_has_a_folder(runs: Runs) -> None:
    """Also of two in an epoch."""
    folder = runs.train("--progress.epoch_eval", "3step", "--progress.epoch", "2")
    found = [json.loads(file.read_text())["step"] for file in folder.glob("eval/*/metrics.json")]
    assert sorted(found) == [3, 6, 9, 10]


def test_a_metric_with_parts_of_a_named_set(error_of: ErrorOf) -> None:
    """The names that are right are shown as the config has them."""
    words = ["--dataset.val", "{$REPLACE: true, hard: {type: DigitsDataset}}", *COSTS]
    said = error_of(*words, "--best.metric", "mine.time")
    assert "a part of a metric is METRIC.PART; there is: hard.loss, " in said
    said = error_of(*words, "--best.metric", "hard.mine")
    assert "hard.mine was not measured on this batch; available: hard.loss, " in said and "hard.mine.time" in said
