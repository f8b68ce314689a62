"""Labels that are no class, and labels that are probabilities, through training, validation and pictures."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from common.base.errors import UserError
from common.evaluation.metric import class_numbers
from engine.conftest import PICTURES
from library.metrics.confusion_metric import ConfusionMatrix
from library.metrics.curve_metric import AreaUnderCurve
from tests.conftest import Runs, metrics
from tests.samples import Digits
from custom.metric.accuracy_metric import Accuracy
from custom.tasks.classification_task import ClassificationTask

HERE = "engine.evaluation.test_ignored_labels"


class Marked(Digits):
    """Every second label is `mark`; without one, only the other samples are there. `soft`: as probabilities."""

    def __init__(self, data_dir: Path, mode: str, mark: int | None = None, soft: bool = False) -> None:
        super().__init__(data_dir, mode)
        self.soft = soft
        if mark is None:
            self.images, self.labels, self.numbers = self.images[::2], self.labels[::2], self.numbers[::2]
        else:
            self.labels[1::2] = mark

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        return {**item, "label": one_hot(item["label"], 10).float()} if self.soft else item


class MaskedTask(ClassificationTask):
    """The loss is a mean over the labels that count."""

    def count(self, batch: dict[str, Any]) -> int:
        label: Tensor = batch["label"]
        return len(label) if label.is_floating_point() else int(((label >= 0) & (label < 10)).sum())


@pytest.mark.parametrize(("mark", "ignore"), [(-100, -100), (-1, -1), (255, 255)])
def test_ignored_labels_change_nothing(runs: Runs, mark: int, ignore: int) -> None:
    """Loss and metrics are those of the other samples alone; pictures are drawn, and no warning says otherwise."""
    section = f"type: {HERE}.Marked, eval_batch_size: 7"
    words = ["--task", f"{{$REPLACE: true, type: {HERE}.MaskedTask}}"]
    words += ["--dataset.train", f"{{$REPLACE: true, type: {HERE}.Marked, mark: {mark}}}"]
    words += ["--dataset.val", f"{{$REPLACE: true, all: {{{section}, mark: {mark}}}, half: {{{section}}}}}"]
    words += ["--loss", f"{{$REPLACE: true, CrossEntropyLoss: {{ignore_index: {ignore}}}}}"]
    words += ["--metric", "{$REPLACE: true, Accuracy: {}, ConfusionMatrix: {}}", "--best.metric", "all.Accuracy"]
    words += ["--pictures.files", "true", *PICTURES, "--progress.epoch", "1", "--debug.max_samples", "0"]
    folder = runs.train(*words)
    values = metrics(folder, "val")[-1]["values"]
    for name in ("loss", "Accuracy", "ConfusionMatrix.macro_f1"):
        assert values[f"all.{name}"] == pytest.approx(values[f"half.{name}"], rel=1e-6), name
    assert list((folder / "progress").rglob("*.png"))
    warnings = [line for line in (folder / "train.log").read_text().splitlines() if "WARNING" in line]
    assert not [line for line in warnings if "class" in line or "label" in line or "loss" in line]


def test_soft_labels(runs: Runs) -> None:
    section = f"type: {HERE}.Marked, eval_batch_size: 7"
    words = ["--task", f"{{$REPLACE: true, type: {HERE}.MaskedTask}}"]
    words += ["--dataset.val", f"{{$REPLACE: true, soft: {{{section}, soft: true}}, hard: {{{section}}}}}"]
    words += ["--loss", "{$REPLACE: true, CrossEntropyLoss: {}}", "--metric", "{$REPLACE: true, Accuracy: {}}"]
    words += [
        "--best.metric",
        "soft.Accuracy",
        "--pictures.files",
        "true",
        *PICTURES,
        "--progress.epoch",
        "1",
        "--debug.max_samples",
        "0",
    ]
    folder = runs.train(*words)
    values = metrics(folder, "val")[-1]["values"]
    for name in ("loss", "Accuracy"):
        assert values[f"soft.{name}"] == pytest.approx(values[f"hard.{name}"], rel=1e-6), name
    assert list((folder / "progress").rglob("*.png"))


def test_a_label_that_is_no_mark_is_still_a_mistake(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Which the loss finds; a mark of the loss is not listed with it."""
    assert runs.fail("--dataset.train", f"{{$REPLACE: true, type: {HERE}.Marked, mark: 11}}")
    said = capsys.readouterr().err
    assert "label 11 in sample " in said and "or -100, which is ignored" in said


def test_masks() -> None:
    """A label for each pixel, 255 at the edges."""
    logits, label = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    label[:, 0] = 255
    accuracy = Accuracy()
    accuracy.update({"logits": logits}, {"label": label})
    right = logits.argmax(1) == label
    assert accuracy.compute() == right[:, 1:].double().mean().item()
    empty = Accuracy()
    empty.update({"logits": logits}, {"label": torch.full_like(label, -1)})
    assert empty.compute() != empty.compute()  # NaN: there is nothing to measure


def test_metrics_leave_them_out() -> None:
    probabilities, label = torch.rand(40, 3).softmax(1), torch.randint(0, 3, (40,))
    output = {"logits": probabilities.log(), "probabilities": probabilities, "prediction": probabilities.argmax(1)}
    marked, kept = label.clone(), torch.arange(40) % 3 > 0
    marked[~kept] = -100
    half = {name: value[kept] for name, value in output.items()}
    counted, alone = ConfusionMatrix(), ConfusionMatrix()
    counted.update(output, {"label": marked})
    alone.update(half, {"label": label[kept]})
    assert torch.equal(counted.counts, alone.counts)
    area = AreaUnderCurve()
    found = area.results(output, {"label": marked})
    assert all(len(value) == 40 for value in found.values())  # one entry per sample, or the run ends
    assert area.compute(found) == area.compute(area.results(half, {"label": label[kept]}))
    none = ConfusionMatrix()
    none.update(output, {"label": torch.full_like(label, -100)})
    assert math.isnan(none.compute()["macro_f1"])
    assert class_numbers(torch.tensor([-100, 2, 3]), probabilities[:3]).tolist() == [-1, 2, -1]


def test_a_prediction_of_no_class_is_wrong() -> None:
    """It is in no class' precision, and in the recall of its label."""
    output = {"logits": torch.zeros(4, 2), "prediction": torch.tensor([0, -1, 1, 5])}
    matrix = ConfusionMatrix(per_class=True)
    matrix.update(output, {"label": torch.tensor([0, 0, 1, 1])})
    values = matrix.compute()
    assert (values["recall_0"], values["recall_1"]) == (0.5, 0.5)
    assert (values["precision_0"], values["precision_1"]) == (1.0, 1.0)


@pytest.mark.parametrize("shape", [(4, 1), (2,), (4, 3)])
def test_labels_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """Integers beside several logits: (4, 1) would be compared with the labels of other samples too."""
    label = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(UserError, match=r"do not fit logits \(4, 3\): class numbers have the shape \(4,\)"):
        Accuracy().update({"logits": torch.zeros(4, 3)}, {"label": label})


def test_accuracy_of_one_logit_is_refused() -> None:
    """It would be 1.0, whatever the labels are: the only class is always the likeliest."""
    logits = torch.zeros(4, 1)
    for label in (torch.tensor([[0.0], [1.0], [1.0], [0.0]]), torch.tensor([0, 1, 1, 0])):
        with pytest.raises(UserError, match=r"needs a logit per class, not one; leave it out: metric: .\$REPLACE"):
            Accuracy().update({"logits": logits}, {"label": label})
