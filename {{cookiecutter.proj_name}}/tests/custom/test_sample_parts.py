"""Your own tests live in this folder. These show how to test a model, a dataset, a loss and a metric."""

from pathlib import Path

import pytest
import torch

import train
from tests.conftest import Runs, metrics
from custom.datasets.digits_dataset import DigitsDataset
from custom.loss.classification_loss import CrossEntropyLoss
from custom.metric.accuracy_metric import Accuracy
from custom.models.conv_model import ConvModel

DATA = Path(train.__file__).parent / "data"


@pytest.mark.parametrize("size", [(8, 8), (13, 20)])
def test_the_model_takes_images_of_any_size(size: tuple[int, int]) -> None:
    logits = ConvModel(in_channels=3, classes=5, width=4)(torch.rand(2, 3, *size))
    assert logits.shape == (2, 5)


def test_every_weight_gets_a_gradient() -> None:
    model = ConvModel(width=4)
    model(torch.rand(2, 1, 8, 8)).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("shift", [0, 2])
def test_the_data_set_gives_an_image_and_its_label(shift: int) -> None:
    data = DigitsDataset(DATA, "train", shift=shift)
    assert len(data) == 1200
    item = data[0]
    assert item["image"].shape == (1, 8, 8)
    assert item["image"].min() >= 0 and item["image"].max() <= 1
    assert 0 <= int(item["label"]) < len(data.classes)


def test_the_loss_is_small_for_the_right_class() -> None:
    loss, batch = CrossEntropyLoss(), {"label": torch.tensor([0, 1])}
    right, wrong = torch.tensor([[9.0, 0.0], [0.0, 9.0]]), torch.tensor([[0.0, 9.0], [9.0, 0.0]])
    assert loss({"logits": right}, batch) < 0.01
    assert loss({"logits": wrong}, batch) > 8


def test_the_metric_counts_over_batches_and_processes() -> None:
    logits, label = torch.eye(4), torch.tensor([0, 1, 2, 0])
    one, other = Accuracy(), Accuracy()
    one.update({"logits": logits[:1]}, {"label": label[:1]})
    other.update({"logits": logits[1:]}, {"label": label[1:]})
    one.merge(other)
    assert one.compute() == 0.75


def test_a_short_run_learns_something(runs: Runs) -> None:
    """The whole program with your parts: `runs.train` takes the words of a command line."""
    folder = runs.train(
        "--config", "configs/default.yaml", "--model.width", "8", "--optim.lr", "0.01", "--progress.epoch", "8"
    )
    first, *_, last = metrics(folder, "val")
    assert last["values"]["loss"] < first["values"]["loss"]
