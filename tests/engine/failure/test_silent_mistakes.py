"""Mistakes that end no run: what the log says of them before training, or after the first validations."""

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.task import Task
from tests.conftest import ErrorOf, Runs
from tests.data.test_images import images
from custom.datasets.digits_dataset import DigitsDataset
from custom.models.conv_model import ConvModel

HERE = "engine.failure.test_silent_mistakes"


class Mine:
    """Digits as a dataset of one's own, which says nothing of its labels and its samples; with a mistake."""

    def __init__(self, data_dir: Path, mode: str, how: str = "") -> None:
        self.digits = DigitsDataset(data_dir, "train" if how == "val is train" else mode)
        self.how, self.order = how, self.digits.labels.argsort() if how == "sorted" else range(len(self.digits))
        if how == "known labels":
            self.labels = self.digits.labels + 1

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.digits[int(self.order[index])]
        image, label = sample["image"], sample["label"]
        image = image * 255 if self.how == "bytes" else image.clone()
        if self.how == "not a number" and index in (3, 7):
            image[0, 0, 0] = torch.nan
        label = label + (self.how == "known labels")
        return {"image": image, "label": label, "name": str(int(label))}


class Weighted(nn.Module):
    """Cross entropy with a weight per class: a mean over weights, or over samples."""

    def __init__(self, mean: str = "weights", meant: bool = False) -> None:
        super().__init__()
        self.mean, self.compares_samples = mean, meant
        self.register_buffer("weights", torch.tensor([1.0, 1, 1, 5, 1, 1, 1, 1, 1, 1]))

    def forward(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        weight, (logits, label) = self.get_buffer("weights"), (output["logits"], batch["label"])
        if self.mean == "weights":
            return nn.functional.cross_entropy(logits, label, weight=weight)
        if self.mean == "noise":
            return nn.functional.cross_entropy(logits + torch.randn_like(logits), label)
        if self.mean == "names":  # a list, of which `zip` uses as much as there are samples
            label = torch.tensor([int(name) for _, name in zip(logits, batch["name"], strict=False)])
        return (weight[label] * nn.functional.cross_entropy(logits, label, reduction="none")).mean()


class Momentum(ConvModel):
    """Its second encoder follows the first one in every forward pass, as MoCo's own code has it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.follower = how, copy.deepcopy(self.head).requires_grad_(False)

    @torch.no_grad()
    def forward(self, image: Tensor) -> Tensor:
        for own, other in zip(self.head.parameters(), self.follower.parameters(), strict=True):
            if self.how == "data":
                other.data = other.data * 0.9 + own.data * 0.1
            elif self.training or self.how == "in place":
                other.lerp_(own, 0.1)
        with torch.enable_grad():
            return super().forward(image)


class Numbers:
    """A number to predict for each sample, in a shape that broadcasts against the prediction."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.x = torch.randn(64, 3)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.x[index].sum()}


class Regression(Task):
    def output(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": self.model(batch["x"])}


def mine(how: str, *splits: str) -> list[str]:
    section = f"{{type: {HERE}.Mine, how: {how}}}"
    return [word for split in splits for word in (f"--dataset.{split}", section)]


def weighted(*given: str) -> list[str]:
    return ["--loss", f"{{$REPLACE: true, mine: {{type: {HERE}.Weighted, {', '.join(given)}}}}}"]


def momentum(how: str) -> list[str]:
    return ["--model", f"{{$REPLACE: true, type: {HERE}.Momentum, how: {how}}}"]


SEQUENTIAL = ["--loader.order", "{type: sequential}"]
ELEVEN = ["--model.classes", "11"]
CASES: list[tuple[list[str], list[str]]] = [
    (mine("bytes", "train", "val"), ["val: `image` has values from 0 to 255"]),
    ([*mine("known labels", "train"), *ELEVEN], ["lacks 1 of 11 classes: 0; add some, or remove the class; labels"]),
    (mine("not a number", "val"), ["Loss of the first batch is nan", "`image` is not finite in sample 3, 7"]),
    (mine("val is train", "train", "val"), ["samples checked are also in dataset.train"]),
    (["--model", f"{{type: {HERE}.probabilities}}"], ["eval: `logits` are probabilities already"]),
    (momentum("data"), ["the forward pass changes follower.2.weight, follower.2.bias in evaluation too"]),
    (momentum("in place"), ["pass changes follower.2.weight, follower.2.bias in evaluation too"]),
    (weighted("mean: weights"), ["mine is not a mean over samples", "docs/evaluation.md, Losses"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "parts"), CASES, ids=[parts[0] for _, parts in CASES])
def test_what_the_log_says(runs: Runs, words: list[str], parts: list[str]) -> None:
    """A warning before the first step, and what to do."""
    log = (runs.train("--debug.max_samples", "0", "--progress.max_steps", "2", *words) / "train.log").read_text()
    said = "\n".join(line for line in log.splitlines() if " WARNING " in line)
    for part in parts:
        assert said.count(part) == 1, log


@pytest.mark.parametrize(
    "words",
    [
        mine("none", "train", "val", "eval"),
        [*mine("none", "train"), *SEQUENTIAL],
        momentum("in training"),
        weighted("mean: samples"),
        weighted("mean: noise"),
        [*mine("none", "train", "val", "eval"), *weighted("mean: names")],
        weighted("mean: weights", "meant: true"),
        ["--dataset.val", "{type: DigitsDataset, transforms: [{type: Normalize, mean: [0.3], std: [0.3]}]}"],
    ],
)
def test_what_is_right_has_no_warning(runs: Runs, words: list[str]) -> None:
    log = (runs.train(*words, "--debug.max_samples", "0", "--progress.max_steps", "2") / "train.log").read_text()
    assert " WARNING " not in log


def no_scalar(output: Any, batch: Any, how: str) -> Any:
    loss = torch.nn.functional.cross_entropy(output["logits"], batch["label"], reduction="none")
    return {"vector": loss, "number": loss.mean().item(), "nothing": None}[how]


@pytest.mark.parametrize(
    ("how", "said"),
    [("vector", "has the shape (160,)"), ("number", "is of type float"), ("nothing", "is of type NoneType")],
)
def test_a_loss_that_is_no_scalar(error_of: ErrorOf, how: str, said: str) -> None:
    """The usual first mistake: what is wrong with which loss, and what to do."""
    text = error_of("--loss", f"{{$REPLACE: true, mine: {{type: {HERE}.no_scalar, how: {how}}}}}")
    assert f"the loss mine {said}" in text and ("use .mean()" in text or "without .item()" in text)


def test_a_target_of_another_shape(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """One error instead of torch's three warnings and a wrong loss; with validation data and without."""
    words = [
        "--task", f"{{type: {HERE}.Regression}}", "--model", "{type: torch.nn.Linear, in_features: 3, out_features: 1}",
        "--loss", "{$REPLACE: true, mse: {type: torch.nn.MSELoss, inputs: {input: output.y, target: batch.y}}}",
        "--metric", "{$REPLACE: true}", "--dataset.train", f"{{type: {HERE}.Numbers}}", "--dataset.eval", "null",
    ]  # fmt: skip
    for val in (f"{{type: {HERE}.Numbers}}", "null"):
        assert runs.fail(*words, "--dataset.val", val) == 1
        text = capsys.readouterr().err
        assert "Using a target size" in text and "target[:, None] in the dataset" in text


def test_classes_in_the_log(runs: Runs, tmp_path: Path) -> None:
    """An empty class, and more classes than a line holds."""
    folder = images(tmp_path / "train", {"cat": 6, "dog": 4, "horse": 0})
    for label in ("cat", "dog", "horse"):
        (tmp_path / "val" / label).mkdir(parents=True)
        for number in range(2):
            shutil.copy(folder / ("cat" if label == "horse" else label) / f"{number}.png", tmp_path / "val" / label)
    part = f"{{type: ImageFolderDataset, size: [8, 8], folder: {tmp_path}"
    words = ["--dataset", f"{{train: {part}/train}}, val: {part}/val}}, eval: null}}"]
    words += ["--model.in_channels", "3", "--model.classes", "3", "--progress.max_steps", "1"]
    log = (runs.train(*words) / "train.log").read_text()
    assert "train data: classes cat 6, dog 4, horse 0" in log
    assert "val data: classes cat 2, dog 2, horse 2" in log
    assert "dataset.train lacks 1 of 3 classes: horse; add some" in log
    log = (runs.train("--progress.max_steps", "1") / "train.log").read_text()
    assert re.search(r"train data: 10 classes of \d+ to \d+ samples: 0 \d+, 1 \d+, 2 \d+, \.\.\.", log)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--gpu_ids", "cpu"], "must be a valid integer or a list or 'all' or 'mps'"),
        (["--model.type", "no_such_package.Net"], "No module named 'no_such_package'"),
        (["--optim", "lr:0.1"], "must be a mapping"),
        (
            ["--model", f"{{type: {HERE}.ten_classes, num_classes: 3}}"],
            "model.num_classes is 3, but dataset.train",
        ),
    ],
)
def test_messages_name_what_was_meant(error_of: ErrorOf, words: list[str], part: str) -> None:
    assert part in error_of(*words)


def probabilities() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(dim=1))


def ten_classes(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
