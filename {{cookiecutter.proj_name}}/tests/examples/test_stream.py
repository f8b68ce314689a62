"""The stream: each record once per epoch, for any number of readers, and read on after a resume."""

import os
from collections import Counter
from pathlib import Path

import pytest
from torch import Tensor, nn

from common.evaluation.loss import LossFactory
from common.evaluation.metric import MetricFactory
from examples.stream.data import Measurements
from examples.stream.task import ForecastTask
from tests.conftest import Runs
from tests.examples.runs import trained

EXAMPLE = "stream/config"
SMALL = [
    "--dataset.train.records", "96", "--dataset.val", "{records: 16, skip: 96}", "--batch_size", "8",
    "--optim.lr_scheduler", "{type: constant}",
]  # fmt: skip


class Noted(ForecastTask):
    """Writes down the records of each step."""

    def __init__(self, model: nn.Module, loss: LossFactory, metric: MetricFactory, folder: str) -> None:
        super().__init__(model, loss, metric)
        self.file = Path(folder) / f"rank{os.environ.get('RANK', '0')}.txt"

    def update(self, name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.last = batch["future"][:, 0].tolist()
        return super().update(name, batch)

    def after_step(self) -> None:
        with open(self.file, "a") as file:
            file.writelines(f"{value!r}\n" for value in self.last)


@pytest.mark.parametrize(
    ("processes", "workers"),
    [(1, 0), (1, 2), pytest.param(2, 0, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_each_record_once_per_epoch(runs: Runs, tmp_path: Path, processes: int, workers: int) -> None:
    """In any reader; two epochs."""
    more = ["--task", f"{{type: tests.examples.test_stream.Noted, folder: {tmp_path}}}", "--num_workers", str(workers)]
    steps = str(24 // processes)
    trained(runs, EXAMPLE, *SMALL, *more, "--progress.max_steps", steps, processes=processes)
    read = Counter(float(line) for file in tmp_path.glob("rank*.txt") for line in file.read_text().split())
    records = Counter(float(record["future"]) for record in Measurements(tmp_path, "train", 96))
    assert len(records) == 96 and read == Counter(dict.fromkeys(records, 2))


def test_the_state_is_the_position() -> None:
    """A second stream reads on where the first one was."""
    first, second = (Measurements(Path(), "train", 10) for _ in range(2))
    records = iter(first)
    before = [next(records) for _ in range(4)]
    second.load_state_dict(first.state_dict())
    after = list(second)
    whole = list(Measurements(Path(), "train", 10))
    assert [float(each["future"]) for each in before + after] == [float(each["future"]) for each in whole]
    assert len(list(second)) == 10  # the next epoch
