"""Metrics of other packages, such as torchmetrics: by import path, or used inside a metric of one's own."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from common.evaluation.metric import GatheredMetric, Metric, Value
from tests.conftest import Runs, metrics
from tests.evaluation.test_evaluation import evaluated_on, numbers
from tests.ranks import several


class Spread:
    """As torchmetrics' classes: exchanges its state with all processes by itself if there is a process group.

    Its state depends on the order of the batches, and cannot be merged.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.state = scale, torch.zeros(())

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.state = self.state * 0.9 + self.scale * (preds.argmax(1) == target).float().mean()

    def compute(self) -> dict[str, Any]:
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
            dist.all_reduce(self.state)
        return {"all": self.state, "by_class": torch.stack([self.state, 2 * self.state]), "list": [{"x": 1}, {"x": 2}]}


class Drawn:
    """Draws numbers, as a bootstrap does."""

    def __init__(self) -> None:
        self.total = 0.0

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.total = 0.9 * self.total + float(torch.rand(()))

    def compute(self) -> float:
        return self.total + random.random()


class Inside(Metric):
    """Merges an object that would be merged a second time by its own package."""

    def __init__(self) -> None:
        self.spread, self.seen = Spread(), 0.0

    def update(self, output: Any, batch: Any) -> None:
        self.seen += float((output["logits"].argmax(1) == batch["label"]).sum())

    def merge(self, other: "Inside") -> None:
        self.seen += other.seen

    def compute(self) -> Value:
        self.spread.state.fill_(self.seen)
        return float(self.spread.compute()["all"])


class InsideGathered(GatheredMetric):
    """Is computed on the main process alone, where others would be waited for in vain."""

    def results(self, output: Any, batch: Any) -> dict[str, Tensor]:
        return {"preds": output["logits"], "target": batch["label"]}

    def compute(self, results: dict[str, Tensor]) -> Value:
        spread = Spread()
        spread.update(**results)
        return float(spread.compute()["all"])


INPUTS = "inputs: {preds: output.logits, target: batch.label}"
SECTIONS = (
    f"{{drawn: {{type: {__name__}.Drawn, {INPUTS}}}, spread: {{type: {__name__}.Spread, scale: 2.0, {INPUTS}}}, "
    f"inside: {{type: {__name__}.Inside}}, gathered: {{type: {__name__}.InsideGathered}}}}"
)


def test_values_of_another_package(runs: Runs) -> None:
    """By name: those of a dict, of a tensor, of a list."""
    values = metrics(runs.train("--metric", SECTIONS, "--best.metric", "Accuracy"), "val")[-1]["values"]
    assert values["inside"] == pytest.approx(160 * values["Accuracy"])
    assert values["spread.by_class.1"] == 2 * values["spread.all"] == 2 * values["spread.by_class.0"]
    assert (values["spread.list.0.x"], values["spread.list.1.x"]) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_the_values_of_one_process(runs: Runs, world: int) -> None:
    """With the same bits, whatever the object does with a process group. Of a training step's batches too."""
    words = ["--metric", SECTIONS, "--progress.train_metric", "true", "--progress.epoch", "1"]
    last = runs.train(*words, "--dataset.val.eval_batch_size", "32") / "checkpoints" / "latest.pt"
    alone = evaluated_on(runs, last, 1, 0, "--split", "val")
    assert numbers(evaluated_on(runs, last, world, 0, "--split", "val")) == numbers(alone)
    several(runs, world, runs.words(*words, name="several"))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (f"{{type: {__name__}.Spread}}", "takes preds, target; say where they are, as in inputs: {preds: output"),
        ("{type: fractions.Fraction, numerator: 1}", "derives from neither Metric nor GatheredMetric, and lacks"),
    ],
)
def test_what_cannot_be_a_metric(runs: Runs, section: str, said: str) -> None:
    with pytest.raises(Exception, match=r"metric\.mine: ") as raised:
        runs.fail("--metric", f"{{mine: {section}}}")
    assert said in str(raised.value)


class Misspelt(InsideGathered):
    """A mistake that only `compute` shows."""

    def compute(self, results: dict[str, Tensor]) -> Value:
        return float(results["pred"].mean())


class NeedsMore(InsideGathered):
    """Cannot be computed of few samples."""

    def compute(self, results: dict[str, Tensor]) -> Value:
        if len(results["preds"]) < 100:
            raise ValueError("needs at least 100 samples")
        return 1.0


def test_metrics_are_computed_before_training(runs: Runs) -> None:
    assert runs.fail("--metric", f"{{mine: {{type: {__name__}.Misspelt}}}}") == 1
    text = (runs.root / "run" / "train.log").read_text()
    assert "KeyError" in text and "in metric.mine" in text and "before training" in text


def test_a_metric_that_needs_more_than_a_batch(runs: Runs) -> None:
    words = ["--metric", f"{{mine: {{type: {__name__}.NeedsMore}}}}", "--dataset.val.eval_batch_size", "32"]
    folder = runs.train(*words)
    assert metrics(folder, "val")[-1]["values"]["mine"] == 1
    text = (folder / "train.log").read_text()
    assert "metrics of the first batch alone fails: ValueError: needs at least 100 samples\n  in metric.mine" in text
