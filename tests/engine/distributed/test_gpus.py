"""GPUs where there are none: how many processes are started for them, and what is done in which order.

On real ones: the template's own tests.
"""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from common.base.errors import UserError
from common.data.loader import LoaderConfig, make_loader
from common.distributed import DistConfig, find_rank, group, spawn
from common.distributed.devices import set_up_process
from common.distributed.launch import read_launch
from common.distributed.seed import random_state, set_random_state
from common.optim.precision import PrecisionConfig, build_precision
import train
from tests.conftest import Runs


class Child:
    """A process that has ended well."""

    returncode = 0

    def poll(self) -> int:
        return 0

    def kill(self) -> None:
        pass


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The command and the environment of each process that would have been started."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def start(command: list[str], *, env: dict[str, str]) -> Child:
        found.append((command, env))
        return Child()

    monkeypatch.setattr(subprocess, "Popen", start)
    return found


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("ids", "count"), [("0,1", 2), ("[1, 3, 0]", 3), ("all", 4), ("2,3", 2)], ids=["two", "three", "all", "the last"]
)
def test_one_process_for_each(runs: Runs, started: list[Any], ids: str, count: int) -> None:
    """The same command, once per device, with the place of each."""
    words = runs.words("--gpu_ids", ids)
    assert train.main(words) == 0
    for command, _ in started:  # between the two, options of the interpreter: the tests' own may have some
        assert (command[0], command[command.index(train.__file__) :]) == (sys.executable, [train.__file__, *words])
    assert len(started) == count
    launches = [read_launch(environment) for _, environment in started]
    assert [(each.launcher, each.rank, each.local_rank) for each in launches if each] == [
        ("spawn", rank, rank) for rank in range(count)
    ]
    assert {(each.world_size, each.local_world) for each in launches if each} == {(count, count)}
    assert not (runs.root / "run").exists()


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu_ids", "0,4"], "PyTorch finds 4 "),
        (["--gpu_ids", "0,0"], "name different numbers"),
        (["--gpu_ids", "0,1", "--dist.processes", "3"], "names 2 device.*dist.processes wants 3"),
    ],
)
def test_what_cannot_be_started(runs: Runs, started: list[Any], words: list[str], message: str) -> None:
    """Refused before any process is."""
    with pytest.raises(UserError, match=message):
        runs.train(*words)
    assert started == []


@pytest.mark.usefixtures("four_gpus")
def test_the_device_is_set_before_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else NCCL of every process would take device 0; and it is told which one is meant."""
    order: list[Any] = []
    environment = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    launched = read_launch(environment)
    assert launched is not None
    place = replace(launched, device=torch.device("cuda", 3), backend="nccl")

    def meet(*_: Any) -> Any:
        order.append("meet")
        return HashStore()

    def init(backend: str, **options: Any) -> None:
        order.append((backend, options["rank"], options["device_id"]))
        raise InterruptedError

    monkeypatch.setattr(torch.accelerator, "set_device_index", order.append)
    monkeypatch.setattr(group, "_open_store", meet)
    monkeypatch.setattr(group, "_join_round", lambda *_: 1)
    monkeypatch.setattr(dist, "init_process_group", init)
    set_up_process(DistConfig(), place)
    with pytest.raises(InterruptedError):
        group.start(place, DistConfig())
    assert order == [place.device, "meet", ("nccl", 1, place.device)]


def test_an_apple_gpu_is_one_device_without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpu_ids: mps, with a torch that reports one; what it computes is unproven: there is none here."""
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    rank = find_rank("mps", DistConfig(), {})
    assert (str(rank.device), rank.is_single_process) == ("mps:0", True)
    assert not make_loader([0], LoaderConfig(), 0, 0, rank.device, batch_size=1).pin_memory
    assert build_precision(PrecisionConfig(mode="bf16"), rank.device).mode == "bf16"
    generator = torch.Generator()
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device: generator.get_state())
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state, device: generator.set_state(state))
    state = random_state(rank.device)
    drawn = torch.rand(3, generator=generator)
    set_random_state(state, rank.device)
    assert torch.equal(torch.rand(3, generator=generator), drawn)
    with pytest.raises(UserError, match=r"0 CUDA device.*--gpu_ids -1 is the CPU, mps an Apple GPU"):
        find_rank(0, DistConfig(), {})
    with pytest.raises(UserError, match=r"mps names 1 device.*wants 2 process"):
        spawn("mps", DistConfig(processes=2), [])


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this computer has an Apple GPU")
def test_an_apple_gpu_that_does_not_exist(runs: Runs) -> None:
    with pytest.raises(UserError, match="gpu_ids: mps: PyTorch finds 0 MPS device"):
        runs.train("--gpu_ids", "mps")
