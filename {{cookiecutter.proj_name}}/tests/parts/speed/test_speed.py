"""Rates that people compare."""

from typing import ClassVar

import pytest
from torch import Tensor

from tests.conftest import Runs, metrics
from tests.samples import Classification
from tests.test_task import of

MODEL = ("--model", "{type: tests.small.Plain}")
ALONE = ("--dataset.val", "null", "--dataset.eval", "null", "--progress.epoch", "1")


class Pixels(Classification):
    """Counts the pixels of its pictures."""

    unit: ClassVar[str] = "pixels"

    def count(self, batch: dict[str, Tensor]) -> int:
        return batch["image"].numel()


def test_rates_and_utilization(runs: Runs) -> None:
    """By hand: each of 64 x 16 weights is used twice, as the input needs no gradient, each of 16 x 10 three times."""
    folder = runs.train("--speed.peak_tflops", "0.5", *of("tests.parts.speed.test_speed.Pixels"), *MODEL, *ALONE)
    flops, rows = 2 * (2 * 64 * 16 + 3 * 16 * 10), [row["values"] for row in metrics(folder, "speed")]
    assert len(rows) == 3
    for row in rows:
        assert row["pixels_per_second"] == pytest.approx(64 * row["samples_per_second"], rel=1e-9)
        assert row["tflops"] == pytest.approx(flops * row["samples_per_second"] / 1e12, rel=1e-9)
        assert row["mfu"] == pytest.approx(row["tflops"] / 0.5, rel=1e-9)
    log = (folder / "train.log").read_text()
    assert all(text in log for text in (" | pixels/s ", "  tflops ", "  mfu "))
