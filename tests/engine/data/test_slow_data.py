"""Training that waits for its data."""

import time
from pathlib import Path

import pytest
from loguru import logger
from torch import Tensor

from common.distributed import Rank
from common.monitor.meter import Timing
from common.progress import Position
from parts.checks.slow_data import SlowDataAdvice
from tests.conftest import Runs
from custom.datasets.digits_dataset import DigitsDataset


class Slow(DigitsDataset):
    """Takes 50 ms for each sample."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(0.05)
        return super().__getitem__(index)


@pytest.mark.slow
def test_it_is_said_once_in_a_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Almost all of the time is spent waiting."""
    monkeypatch.setattr("parts.checks.slow_data.available_cores", lambda: 3)
    data = ["--dataset.train", "{type: engine.data.test_slow_data.Slow}", "--dataset.val", "null", "--batch_size", "8"]
    folder = runs.train(*data, "--progress.max_steps", "10", "--progress.log_every", "2")
    log = (folder / "train.log").read_text()
    assert log.count("of the time is spent waiting for data") == 1
    assert "; try more workers (--num_workers is 0, cores of this process: 3), or keep it in memory" in log


def warnings(*, wait: float, workers: int, work: float = 0.04, count: int = 100, processes: int = 1) -> list[str]:
    """Return what is logged at two log lines, each after `count` steps."""
    lines: list[str] = []
    number = logger.add(lines.append, format="{message}")
    call = SlowDataAdvice(workers, Rank(local_world=processes), Position())
    for line in (1, 2):
        call(Position(step=line * count), Timing(step=wait + work, data=wait / (wait + work), rate=1.0, eta=None))
    logger.remove(number)
    return lines


def test_waiting_for_data_is_worth_a_warning_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to change; and none for a fast loop, where waiting is the cost of a call."""
    monkeypatch.setattr("parts.checks.slow_data.available_cores", lambda: 8)
    (advice,) = warnings(wait=0.06, workers=2)
    assert "60% of the time" in advice
    assert "try more workers (--num_workers is 2" in advice
    assert "more workers would not help" in str(warnings(wait=0.06, workers=8))
    text = str(warnings(wait=0.06, workers=4, processes=2))
    assert "would not help: try less work per sample (--num_workers is 4, cores of this process: 4), or" in text
    assert warnings(wait=0.01, workers=2) == []
    assert warnings(wait=0.06, workers=2, count=10) == []
    assert warnings(wait=0.0005, work=0.0005, count=9000, workers=0) == []
