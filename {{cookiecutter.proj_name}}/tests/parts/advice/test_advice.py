"""Mistakes in one's own model, dataset, loss or metric: the message names the cause, the place and a remedy."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Runs, run
from tests.samples import Digits, Share
from tests.small import Plain


class WrongModel(Plain):
    """A model with a mistake in its forward, or one that a warning is about."""

    def __init__(self, how: str, classes: int = 10) -> None:
        super().__init__()
        self.how = how
        self.head = nn.Linear(10, classes)
        if how == "constant":
            self.unused = nn.Linear(2, 2)

    def forward(self, image: Tensor) -> Any:
        logits = self.head(super().forward(image))
        if self.how == "in place":
            logits = torch.sigmoid(logits)
            logits += 1
        results = {
            "tuple": (logits, None),
            "nothing": None,
            "mean": logits.mean(0),
            "scalar": logits.mean(),
            "detached": logits.detach(),
            "constant": (logits * 0).softmax(1),
        }
        return results.get(self.how, logits)


class WrongDigits(Digits):
    """Digits with a mistake in the samples."""

    random = False

    def __init__(self, data_dir: Path, mode: str, how: str) -> None:
        super().__init__(data_dir, mode)
        self.how = how

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        image, label = sample["image"], torch.as_tensor(sample["label"])
        changed = {
            "tuple": (image, label),
            "key": {"image": image, "target": label},
            "float label": {"image": image, "label": label.float()},
            "label in a list": {"image": image, "label": label[None]},
            "double": {"image": image.double(), "label": label},
            "label 10": {"image": image, "label": label + 10 * (index == 7)},
            "size": {"image": image[:, : 8 - (index == 7)], "label": label},
            "nothing": None,
        }
        return changed.get(self.how, sample)


class WrongMetric(Share):
    """Reads a value that the output does not have."""

    def update(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
        super().update({"logits": output["preds"]}, batch)


def model(how: str) -> list[str]:
    return ["--model", f"{{type: tests.parts.advice.test_advice.WrongModel, how: {how}}}"]


def data(how: str, split: str) -> list[str]:
    words = [f"--dataset.{split}", f"{{type: tests.parts.advice.test_advice.WrongDigits, how: {how}}}"]
    return [*words, "--dataset.val", "null"] if split == "train" else words


CASES: list[tuple[list[str], int, list[str]]] = [
    (model("tuple"), 1, ["logits a tuple of 2 (float32 (160, 10), None)", "WrongModel.forward must return"]),
    (model("nothing"), 1, ["with the output: logits None", "not None"]),
    (model("mean"), 1, ["logits float32 (10,)", "must keep the first dimension"]),
    (model("scalar"), 1, ["logits float32 ()", "must keep the first dimension"]),
    (["--model.in_channels", "3"], 1, ["image float32 (160, 1, 8, 8)", "not fit the batch", "as model.in_channels"]),
    (model("detached"), 1, ["the result of WrongModel.forward or of", ".detach()"]),
    (model("in place"), 1, ["x = x + y; --debug shows"]),
    (data("tuple", "val"), 1, ["the batch: a list of 2 (float32", "a sample is a dict", "{type: Named, names: [image"]),
    (data("key", "val"), 1, ["image float32 (160, 1, 8, 8), target int64 (160,)", "the keys are listed above"]),
    (["--metric", "{x: {type: tests.parts.advice.test_advice.WrongMetric}}"], 1, ["'preds'", "output: logits float32"]),
    (data("float label", "val"), 1, ["label float32 (160,)", "class labels must be of type int64"]),
    (data("label in a list", "val"), 1, ["label int64 (160, 1)", "each label must be a single number: return"]),
    (data("double", "val"), 1, ["image float64", "not have the dtype of the weights (float32)"]),
    (data("label 10", "val"), 2, ["in sample 7 of dataset.val: the model gives 10 classes, so labels must be 0 to 9"]),
    (data("label 10", "train"), 2, ["in sample 7 of dataset.train: the model gives 10 classes"]),
    (data("size", "val"), 2, ["6, 7, ... of WrongDigits", "need the same entries and shapes"]),
    (data("nothing", "val"), 2, ["no batch can be made of samples 0, 1, ", "of WrongDigits: TypeError", "NoneType"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "parts"), CASES)
def test_what_the_message_says(
    runs: Runs, capsys: pytest.CaptureFixture[str], words: list[str], code: int, parts: list[str]
) -> None:
    """Cause, place and remedy."""
    assert runs.fail(*words, "--batch_size", "160") == code
    text = capsys.readouterr().err
    text = text[text.rfind(" failed ====" if code == 1 else " ERROR ") :]
    for part in parts:
        assert part in text, text
    assert code == 1 or "Traceback" not in text


def test_errors_that_a_worker_reports(runs: Runs) -> None:
    """Samples that a worker could not join; and the message is the last of the output."""
    words = runs.words(*data("size", "train"), "--num_workers", "1", "--dataset.eval", "null")
    done = run([sys.executable, "train.py", *words])
    assert done.returncode == 2
    assert "need the same entries and shapes" in done.stderr
    assert "killed by signal" not in done.stderr


@pytest.mark.parametrize("has_mistakes", [True, False])
def test_warnings_of_what_does_not_fail(runs: Runs, has_mistakes: bool) -> None:
    """A model with too many classes and an unused layer; nothing otherwise."""
    words = [*model("constant"), "--model.classes", "12"] if has_mistakes else []
    log = (runs.train(*words) / "train.log").read_text()
    counts = [
        log.count("; if that is not intended, use --model.classes 10"),
        log.count("2 parameters got no gradient in the first step, although they should be trained: unused.weight"),
    ]
    assert counts == [int(has_mistakes)] * 2
