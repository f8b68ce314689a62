"""What is set in each process, and in the processes that read data."""

import multiprocessing
import os
import signal
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from common.base.process import raise_file_limit
from common.data.workers import set_up_worker
from common.distributed import DistConfig, Rank, find_rank
from common.distributed.devices import cores, set_up_process
from common.run.record import machine
import evaluate
from tests.conftest import Runs, load, same
from tests.distributed.test_launch import TORCHRUN
from custom.datasets.digits_dataset import DigitsDataset


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_ways_to_start_workers(runs: Runs, method: str) -> None:
    """Datasets, collate functions and registries survive a start without fork, with the same result."""
    plain = runs.train("--progress.epoch", "1", name="plain")
    words = [
        "--num_workers",
        "1",
        "--loader.start_method",
        method,
        "--progress.epoch",
        "1",
        "--progress.epoch_val",
        "-1",
    ]
    folder = runs.train(*words, name=method)
    assert same(load(plain)["model"], load(folder)["model"])


def test_workers_end_with_the_run(runs: Runs) -> None:
    """At once, and not when Python collects what is left of it: that took 5 s for each."""
    before = set(multiprocessing.active_children())
    folder = runs.train("--num_workers", "2", "--progress.epoch_eval", "1")
    assert evaluate.main(["--model_pt", str(folder / "checkpoints" / "best.pt")]) == 0
    assert set(multiprocessing.active_children()) <= before


class Decoded(DigitsDataset):
    """Has a program read one of its items, and ends it, as those that read videos do."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 7:
            program = subprocess.Popen(["sleep", "100"])
            program.terminate()
            assert program.wait(20) == -signal.SIGTERM
        return super().__getitem__(index)


def test_programs_of_a_data_set(runs: Runs) -> None:
    """That workers do not heed SIGTERM is not handed on to what they start."""
    runs.train("--num_workers", "1", "--dataset.train", f"{{type: {__name__}.Decoded}}", "--progress.epoch", "1")


def test_threads_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores of a host are dealt out to its processes, unless the launcher or the user has said otherwise."""
    monkeypatch.setattr("common.distributed.devices.available_cores", lambda: 8)
    assert [cores(Rank(local_world=count), {}) for count in (1, 2, 16)] == [8, 4, 1]
    promised = {"SLURM_CPUS_PER_TASK": "6"}
    assert cores(Rank(local_world=4, launcher="slurm"), promised) == 6  # promised to each
    assert cores(Rank(local_world=4), promised) == 2  # these four are one of Slurm's tasks
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    launched = find_rank(-1, DistConfig(), TORCHRUN)
    set_up_process(DistConfig(), launched)
    assert threads == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    set_up_process(DistConfig(), launched)
    assert threads == [4]


def test_open_files() -> None:
    """Raised as far as allowed, and never lowered."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[0]), before[1]))
        for _ in range(2):
            raise_file_limit()
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(1 << 20, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name; determinism wins."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    set_up_process(DistConfig(cudnn_benchmark=True), Rank())
    assert torch.backends.cudnn.benchmark
    try:
        set_up_process(DistConfig(cudnn_benchmark=True, deterministic="warn"), Rank())
        assert not torch.backends.cudnn.benchmark
        assert not machine(torch.device("cpu"))["deterministic"]  # it may do what it warns of
        set_up_process(DistConfig(deterministic="strict"), Rank())
        assert machine(torch.device("cpu"))["deterministic"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_opencv_gets_no_threads_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where a dataset has imported it."""
    seen: list[int] = []
    stand_in: Any = types.ModuleType("cv2")
    stand_in.setNumThreads = seen.append
    monkeypatch.setitem(sys.modules, "cv2", stand_in)
    monkeypatch.setattr("common.data.workers.die_with_parent", lambda: None)
    for name in ("signal", "siginterrupt", "pthread_sigmask"):
        monkeypatch.setattr(f"common.data.workers.signal.{name}", lambda *_: None)
    set_up_worker(os.getpid(), 0)
    assert seen == [0]
