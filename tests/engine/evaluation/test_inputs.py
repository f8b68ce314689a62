"""`inputs` of a metric, and the line of the log that says which value was the best."""

import re
from typing import Any

import pytest

from tests.conftest import ErrorOf, Runs, metrics
from custom.datasets.digits_dataset import DigitsDataset

HERE = "engine.evaluation.test_inputs"
OTHER = [
    "--dataset", f"{{train: {{type: {HERE}.Others}}, val: {{type: {HERE}.Others}}, eval: null}}",
    "--loss", "{$REPLACE: true, ce: {type: torch.nn.CrossEntropyLoss, "
    "inputs: {input: output.logits, target: batch.labels}}}",
    "--progress.epoch", "1",
]  # fmt: skip


class Others(DigitsDataset):
    """Its labels are called `labels`."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {"image": sample["image"], "labels": sample["label"]}


def test_a_metric_finds_what_has_another_name(runs: Runs) -> None:
    """Both kinds of metric, the parts that are not named as before: the values of data with the usual name."""
    name = "inputs: {label: batch.labels}"
    wanted = f"Accuracy: {{k: 2, {name}}}, ConfusionMatrix: {{{name}}}, AreaUnderCurve: {{{name}}}"
    folder = runs.train(*OTHER, "--metric", f"{{$REPLACE: true, {wanted}}}", name="other")
    usual = "--metric", "{$REPLACE: true, Accuracy: {k: 2}, ConfusionMatrix: null, AreaUnderCurve: null}"
    plain = runs.train(
        *("--dataset", "{train: {type: DigitsDataset, shift: 0}, val: {type: DigitsDataset}, eval: null}", *usual),
        *("--loss", "{$REPLACE: true, ce: {type: CrossEntropyLoss}}", "--progress.epoch", "1"),
        name="plain",
    )
    first, second = (metrics(run, "val")[-1]["values"] for run in (folder, plain))
    assert first == second and {"Accuracy", "ConfusionMatrix.macro_f1", "AreaUnderCurve"} <= first.keys()


def test_mistakes_in_inputs(error_of: ErrorOf) -> None:
    """Before anything is built, and at the sanity check."""
    for text, said in (
        ("{label: label}", "must be output.<name> or batch.<name>"),
        ("[label]", "metric.Accuracy.inputs"),
    ):
        assert said in error_of("--metric", f"{{Accuracy: {{inputs: {text}}}}}")
    assert "metric.Accuracy = 3 (command line: --metric.Accuracy 3) must be a section" in error_of(
        "--metric.Accuracy", "3"
    )
    said = error_of(*OTHER, "--metric", "{Accuracy: {inputs: {label: batch.lables}}}")
    assert "metric.Accuracy.inputs: batch.lables does not exist; available: image, labels" in said


@pytest.mark.parametrize(
    ("words", "decides"),
    [
        (["--dataset.val", "{$REPLACE: true, near: {type: DigitsDataset}, far: {type: DigitsDataset, shift: 2}}",
          "--best.metric", "far.Accuracy"], "val.far"),
    ],
)  # fmt: skip
def test_best_stands_on_the_line_that_decides(runs: Runs, words: list[str], decides: str) -> None:
    log = (runs.train(*words, "--progress.epoch", "1") / "train.log").read_text()
    lines = [line for line in log.splitlines() if re.search(r" val\S* +1/1 step ", line)]
    assert len(lines) == 2
    assert [line for line in lines if "best so far" in line] == [line for line in lines if f" {decides} " in line] != []
