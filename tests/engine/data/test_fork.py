"""Workers, and a dataset that uses the GPU."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Runs
from custom.datasets.digits_dataset import DigitsDataset


class DigitsOnGpu(DigitsDataset):
    """Fails in a worker with what CUDA says in a forked process."""

    def __init__(self, data_dir: Path, mode: str, text: str = "CUDA error: initialization error") -> None:
        super().__init__(data_dir, mode)
        self.text = text

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if torch.utils.data.get_worker_info() is not None:
            raise RuntimeError(self.text)
        return super().__getitem__(index)


class MovedToGpu(DigitsDataset):
    """Fails in a process that was forked by the trainer, as a tensor on a GPU does."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        super().__init__(data_dir, mode)
        self.owner = os.getpid()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        assert os.getppid() != self.owner
        return super().__getitem__(index)


class Endless:
    """Can only be read in order."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.source = DigitsOnGpu(data_dir, mode)

    def __iter__(self) -> Iterator[Any]:
        if torch.multiprocessing.parent_process() is not None:
            raise RuntimeError("CUDA error: initialization error\nCompile with `TORCH_USE_CUDA_DSA` ...")
        return (self.source[index] for index in range(64))


@pytest.mark.parametrize("dataset", ["DigitsOnGpu", "Endless"])
def test_forked_workers_for_a_data_set_on_the_gpu(runs: Runs, dataset: str) -> None:
    """Ends at the first batch, with the ways out."""
    assert runs.fail("--dataset.train", f"{{type: engine.data.test_fork.{dataset}}}", "--num_workers", "1") == 1
    message = (runs.root / "run" / "train.log").read_text()
    assert "cannot use the GPU" in message and "CUDA" in message
    assert "--loader.start_method forkserver" in message and "--num_workers 0" in message


@pytest.mark.slow
def test_another_error_of_a_worker_keeps_its_words(runs: Runs) -> None:
    data = "{type: engine.data.test_fork.DigitsOnGpu, text: CUDA out of memory}"
    assert runs.fail("--dataset.train", data, "--num_workers", "1") == 1
    assert "CUDA out of memory" in (runs.root / "run" / "train.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["--num_workers", "0"], ["--num_workers", "1", "--loader.start_method", "forkserver"]]
)
def test_the_ways_out(runs: Runs, words: list[str]) -> None:
    """Both work."""
    data = ["--dataset.train", "{type: engine.data.test_fork.MovedToGpu}", "--progress.max_steps", "1"]
    runs.train(*data, *words, "--progress.epoch_val", "-1")
