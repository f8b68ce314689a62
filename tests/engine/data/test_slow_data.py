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
def test_the_number_of_workers_to_try(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per run, and no more workers than cores: here, almost all of the time is spent waiting."""
    monkeypatch.setattr("parts.checks.slow_data.available_cores", lambda: 3)
    data = ["--dataset.train", "{type: engine.data.test_slow_data.Slow}", "--dataset.val", "null", "--batch_size", "8"]
    folder = runs.train(*data, "--progress.max_steps", "10", "--progress.log_every", "2")
    log = (folder / "train.log").read_text()
    assert log.count("of the time is spent waiting for data") == 1
    assert "; try --num_workers 3 (now 0; this process has 3 cores), or keep it in memory" in log


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
    assert "--num_workers 5 (now 2" in advice
    assert "memory" in str(warnings(wait=0.06, workers=8))
    assert "--num_workers 2 (now 0; this process has 8 cores)" in str(warnings(wait=0.06, workers=0))
    assert "--num_workers 1 (now 0" in str(warnings(wait=0.03, workers=0))
    assert "--num_workers 4 (now 2; this process has 4 cores)" in str(warnings(wait=0.06, workers=2, processes=2))
    text = str(warnings(wait=0.06, workers=4, processes=2))
    assert (
        "--num_workers" not in text
        and "more workers would not help (now 4; this process has 4 cores): try less work per sample, or" in text
    )
    assert warnings(wait=0.01, workers=2) == []
    assert warnings(wait=0.06, workers=2, count=10) == []
    assert warnings(wait=0.0005, work=0.0005, count=9000, workers=0) == []
