"""The metrics of the examples, on results whose value is known."""

import pytest
import torch
from torch import Tensor

from examples.boxes.metric import AveragePrecision
from examples.gan.task import NearestReal
from examples.metric_learning.task import RecallAt1
from examples.regression.task import R2, Coverage
from examples.segmentation.data import IGNORED
from examples.segmentation.task import MeanIoU


def found(*rows: tuple[float, ...]) -> Tensor:
    """Boxes of 10 pixels at x: (x, probability, class), as a detector gives them."""
    return torch.tensor([[x, 0.0, x + 10.0, 10.0, probability, kind] for x, probability, kind in rows])


@pytest.mark.parametrize(
    ("rows", "value"),
    [
        ([(0, 0.9, 0), (20, 0.8, 0), (40, 0.7, 1)], 1.0),
        ([(1, 0.9, 0), (60, 0.8, 0), (22, 0.7, 0)], (1 + 2 / 3) / 4),  # of class 0: right, wrong, right; nothing of 1
        ([(0, 0.9, 0), (1, 0.8, 0), (60, 0.7, 0)], 0.5 / 2),  # the second finds the first's box again
        ([(0, 0.9, 1), (20, 0.8, 1), (40, 0.7, 0)], 0.0),  # the boxes are right, the classes are not
        ([(4, 0.9, 0), (24, 0.8, 0), (44, 0.7, 1)], 0.0),  # overlaps of 6 / 14
    ],
)
def test_average_precision(rows: list[tuple[float, ...]], value: float) -> None:
    boxes = found((0, 1, 0), (20, 1, 0), (40, 1, 1))[:, :4]
    metric, batch = AveragePrecision(), {"boxes": [boxes], "label": [torch.tensor([0, 0, 1])]}
    assert metric.compute(metric.results({"found": found(*rows)[None]}, batch)) == pytest.approx(value)


def test_mean_iou() -> None:
    """Over the classes that occur, in two parts; an ignored pixel counts nowhere."""
    one, other = MeanIoU(4), MeanIoU(4)
    mask, prediction = torch.tensor([[0, 0, 1, IGNORED]]), torch.tensor([[0, 1, 1, 3]])
    one.update({"prediction": prediction[:, :2]}, {"mask": mask[:, :2]})
    other.update({"prediction": prediction[:, 2:]}, {"mask": mask[:, 2:]})
    one.merge(other)
    assert one.compute() == 0.5


def test_r2_and_coverage() -> None:
    """The mean explains nothing, the truth everything."""
    y, ones, metric = torch.tensor([1.0, 2.0, 6.0, 7.0]), torch.ones(4), R2()
    for mean, value in ((y, 1.0), (4 * ones, 0.0), (torch.tensor([2.0, 2.0, 6.0, 7.0]), 1 - 1 / 26)):
        assert metric.compute(metric.results({"mean": mean}, {"y": y})) == pytest.approx(value, abs=1e-15)
    coverage = Coverage()
    coverage.update(
        {"mean": y + torch.tensor([0.0, 1.6, -1.7, 3.2]), "variance": torch.tensor([1.0, 1, 1, 4])}, {"y": y}
    )
    assert coverage.compute() == 0.75


def test_recall_at_1() -> None:
    """The last one's nearest neighbour is the second."""
    points = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.7, 0.3]])
    metric = RecallAt1()
    output = {"embedding": torch.nn.functional.normalize(points)}
    assert metric.compute(metric.results(output, {"label": torch.tensor([0, 0, 1, 1])})) == 0.75


def test_generated_images() -> None:
    """The real ones again; one of them only; those of the other class."""
    torch.manual_seed(0)
    label = torch.arange(2).repeat_interleave(20)
    real = torch.rand(40, 1, 2, 2) + 5 * label[:, None, None, None]
    metric = NearestReal()

    def values(generated: Tensor) -> dict[str, float]:
        return metric.compute(metric.results({"image": generated}, {"image": real, "label": label}))

    assert values(real.clone()) == {"recognised": 1.0, "coverage": 1.0}
    repeated = values(real[label * 20])
    assert repeated["recognised"] == 1.0 and repeated["coverage"] < 0.6
    assert values(real.roll(20, dims=0)) == {"recognised": 0.0, "coverage": 0.0}
