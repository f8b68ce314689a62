"""The metrics that come with the project, against counting by hand."""

import math
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from library.metrics import curve_metric
from library.metrics.confusion_metric import ConfusionMatrix
from library.metrics.curve_metric import AreaUnderCurve, MeanAveragePrecision
from tests.conftest import CONFIG, ENVIRONMENT, PROJECT, run


def scores(seed: int, ties: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(41, 4, generator=generator)
    labels = torch.randint(0, 3, (41,), generator=generator)  # the fourth class has no samples
    return (probabilities * 5).round() if ties else probabilities, labels


@pytest.mark.parametrize(("seed", "ties"), [(0, True), (1, True), (2, False)])
def test_areas_under_curves(seed: int, ties: bool) -> None:
    """Against counting all pairs, and against walking all thresholds."""
    probabilities, labels = scores(seed, ties)
    areas, precisions = [], []
    for number in range(3):
        own = [float(score) for score in probabilities[labels == number, number]]
        others = [float(score) for score in probabilities[labels != number, number]]
        won = sum(Fraction(1 + (a > b) - (a < b), 2) for a in own for b in others)
        areas.append(won / (len(own) * len(others)))
        precision, recalled = Fraction(0), 0
        for threshold in sorted({*own, *others}, reverse=True):
            hits, taken = sum(a >= threshold for a in own), sum(a >= threshold for a in own + others)
            precision += Fraction(hits, taken) * Fraction(hits - recalled, len(own))
            recalled = hits
        precisions.append(precision)
    results = {"probabilities": probabilities, "label": labels}
    assert AreaUnderCurve().compute(results) == pytest.approx(float(sum(areas) / 3), abs=1e-15)
    assert MeanAveragePrecision().compute(results) == pytest.approx(float(sum(precisions) / 3), abs=1e-15)
    perfect = {"probabilities": torch.eye(3)[labels], "label": labels}
    assert AreaUnderCurve().compute(perfect) == MeanAveragePrecision().compute(perfect) == 1.0
    assert math.isnan(AreaUnderCurve().compute({"probabilities": torch.ones(3, 2), "label": torch.zeros(3).long()}))


def test_a_probability_that_is_not_finite_gives_no_area() -> None:
    """The log then says so, as of any value; scikit-learn would refuse it."""
    probabilities, labels = scores(0)
    probabilities[3, 1] = math.nan
    assert math.isnan(AreaUnderCurve().compute({"probabilities": probabilities, "label": labels}))


@pytest.mark.slow
def test_without_the_packages(tmp_path: Path) -> None:
    """All else works; who names such a metric reads which package is missing, and where."""

    def said(missing: str, *words: str) -> str:
        (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules['{missing}'] = None\n")
        environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{PROJECT}"}
        done = run([sys.executable, "train.py", "--config", str(CONFIG), *words], env=environment)
        return " ".join((done.stdout + done.stderr).split())

    curves = f"curve_metric.py:{line_of('sklearn')} needs sklearn, which is not installed"
    assert curves in said("sklearn", "--list", "metric") and curves in said("sklearn", "--metric.AreaUnderCurve", "{}")
    few = ["--dir.runs_dir", str(tmp_path), "--progress.max_steps", "1", "--debug.max_samples", "64"]
    log = said("sklearn", *few)
    assert "finished" in log and "not installed" not in log


def line_of(word: str) -> int:
    """Return the line of the metrics of curves that asks for a package."""
    lines = Path(curve_metric.__file__).read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if f'needs("{word}")' in text]
    return line


def test_confusion_matrix() -> None:
    """Against counting by hand; a class without samples or predictions is left out."""
    probabilities, labels = scores(5)
    predictions = probabilities[:, :3].argmax(dim=1)
    metric, other, empty = ConfusionMatrix(per_class=True), ConfusionMatrix(), ConfusionMatrix()
    for part, into in ((slice(0, 17), metric), (slice(17, None), other)):
        into.update({"logits": probabilities[part], "prediction": predictions[part]}, {"label": labels[part]})
    metric.merge(empty)
    metric.merge(other)
    pairs = list(zip(labels.tolist(), predictions.tolist(), strict=True))
    recall, f1 = [], []
    for number in range(3):
        hits = pairs.count((number, number))
        labelled, predicted = sum(a == number for a, _ in pairs), sum(b == number for _, b in pairs)
        recall.append(hits / labelled)
        f1.append(2 * hits / (labelled + predicted))
    values = metric.compute()
    assert values["balanced_accuracy"] == pytest.approx(sum(recall) / 3, abs=1e-15)
    assert values["macro_f1"] == pytest.approx(sum(f1) / 3, abs=1e-15)
    assert [values[f"recall_{number}"] for number in range(3)] == recall
    assert math.isnan(values["recall_3"]) and math.isnan(values["precision_3"])
