"""Warnings before training, and none without a reason."""

from typing import Any

import pytest
from loguru import logger
from torch import nn

from common.data.order import EpochPlan
from parts.checks.around import warn_of_single_samples
from tests.conftest import Runs


def test_a_run_names_its_classes(runs: Runs) -> None:
    log = (runs.train("--progress.max_steps", "1") / "train.log").read_text()
    assert "train data: 10 classes of " in log
    assert " WARNING " not in log


@pytest.mark.parametrize(
    ("size", "drop_last", "norm", "warns"),
    [(33, False, True, True), (33, True, True, False), (33, False, False, False), (34, False, True, False)],
)
def test_a_last_batch_of_one_sample(size: int, drop_last: bool, norm: bool, warns: bool) -> None:
    """Batch norm cannot compute a variance of it."""
    lines: list[str] = []
    number = logger.add(lines.append, format="{message}")
    task: Any = nn.Sequential(nn.BatchNorm1d(4) if norm else nn.LayerNorm(4))
    warn_of_single_samples(task, EpochPlan(size, batch_size=16, drop_last=drop_last))
    logger.remove(number)
    assert bool(lines) == warns and all("drop_last true" in line for line in lines)
