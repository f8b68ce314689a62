"""Training that waits for its data."""

import time
from pathlib import Path

import pytest
from torch import Tensor

from tests.conftest import Runs
from custom.datasets.digits_dataset import DigitsDataset


class Slow(DigitsDataset):
    """Takes 50 ms for each sample."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(0.05)
        return super().__getitem__(index)


def test_the_number_of_workers_to_try(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per run, and no more workers than cores: here, almost all of the time is spent waiting."""
    monkeypatch.setattr("common.monitor.clock.available_cores", lambda: 3)
    data = ["--dataset.train", "{type: tests.data.test_slow_data.Slow}", "--dataset.val", "null", "--batch_size", "8"]
    folder = runs.train(*data, "--progress.max_steps", "10", "--progress.iter_loss", "2")
    log = (folder / "train.log").read_text()
    assert log.count("of the time is spent waiting for data") == 1
    assert "; try --worker 3 (now 0; this process has 3 cores), or data kept in memory" in log
