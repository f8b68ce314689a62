"""Workers, and a data set that uses the GPU."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import train
from common.base.errors import UserError
from common.data.fork import check_fork
from tests.conftest import Runs
from custom.datasets.digits_dataset import DigitsDataset


class OnGpu(Tensor):
    """A tensor that says that it lies on a GPU; it must stay there."""

    is_cuda = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.zeros, (1,)


class DigitsOnGpu(DigitsDataset):
    """Holds something on the GPU, in a list in a dict."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.tables = {"mean": [torch.zeros(1), torch.zeros(1).as_subclass(OnGpu)]}


class Endless:
    """Can only be read in order."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.source = DigitsOnGpu(data_dir, mode)

    def __iter__(self) -> Iterator[Any]:
        return (self.source[index] for index in range(64))


@pytest.mark.parametrize("dataset", ["DigitsOnGpu", "Endless"])
@pytest.mark.parametrize("method", ["null", "fork"])
def test_forked_workers_for_a_data_set_on_the_gpu(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dataset: str, method: str
) -> None:
    """R-57: refused before training, with the ways out; `null` is what Python does here."""
    monkeypatch.setattr("multiprocessing.get_start_method", lambda: "fork")
    words = runs.words("--dataset.train", f"{{type: tests.data.test_fork.{dataset}}}", "--worker", "1")
    with pytest.raises(UserError) as error:
        train.main([*words, "--loader.start_method", method])
    told = str(error.value)
    assert re.search(r"tables\['mean'\]\[1\] lies on a GPU", told)
    assert "--loader.start_method forkserver" in told and "--worker 0" in told
    assert not (runs.root / "run").exists()


@pytest.mark.parametrize("words", [["--worker", "0"], ["--worker", "1", "--loader.start_method", "forkserver"]])
def test_the_ways_out(runs: Runs, words: list[str]) -> None:
    """R-57: both work."""
    data = ["--dataset.train", "{type: tests.data.test_fork.DigitsOnGpu}", "--progress.max_steps", "1"]
    runs.train(*data, *words, "--progress.epoch_val", "-1")


def test_what_is_looked_at() -> None:
    """R-57: modules too; nothing is found where there is nothing, and loops end."""
    model: Any = nn.Linear(2, 2)
    value: Any = type("Dataset", (), {})()
    value.itself, value.model = value, model
    check_fork(value, "fork", 2)
    model.register_buffer("table", torch.zeros(1).as_subclass(OnGpu))
    with pytest.raises(UserError, match=r"^Dataset\.(itself\.)*model"):
        check_fork(value, "fork", 2)
