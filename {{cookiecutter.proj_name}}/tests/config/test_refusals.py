"""Devices and processes that do not go together: refused with the command that would be right, as it was started."""

import os
from collections.abc import Callable

import pytest
import torch

import evaluate
import train
from common.failure.program import reported
from tests.conftest import CONFIG

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_")
TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "123",
}  # fmt: skip

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Start a program as a launcher would, where so many GPUs can be seen; what a person reads."""

    def call(program: str, seen: int, variables: dict[str, str], *words: str) -> str:
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", "")  # no scontrol
        monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        main = train.main if program == "train.py" else evaluate.main
        with pytest.raises(SystemExit) as ended, reported():
            main(["--config", str(CONFIG), *words])
        assert ended.value.code == 2
        return capsys.readouterr().err

    return call


@pytest.mark.parametrize("program", ["train.py", "evaluate.py"])
@pytest.mark.parametrize(
    ("seen", "variables", "gpus", "told"),
    [
        (
            4,
            TORCHRUN,
            "0,1,2",
            ["torchrun --standalone --nproc-per-node=3 {} --gpu_ids 0,1,2 ...", "python {} --gpu_ids"],
        ),
        (
            4,
            TORCHRUN,
            "0",
            ["torchrun --standalone --nproc-per-node=1 {} --gpu_ids 0", "and name their devices: --gpu_ids 0,1"],
        ),
        (4, {**TORCHRUN, "WORLD_SIZE": "6"}, "0", ["torchrun --nnodes=3 ... --nproc-per-node=1 {} --gpu_ids 0"]),
        (4, SLURM, "0,1,2,3", ["srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 python {} --gpu_ids 0,1,2,3 ..."]),
        (4, MPI, "0,1,2", ["mpirun -n 3 python {} --gpu_ids 0,1,2 ...", "python {} --gpu_ids 0,1,2 ..."]),
    ],
    ids=["more-devices", "fewer-devices", "several-hosts", "slurm", "mpi"],
)
def test_as_many_processes_as_devices(
    refused: Refused, program: str, seen: int, variables: dict[str, str], gpus: str, told: list[str]
) -> None:
    """R-64: in the words of the launcher that was used, for the program that was started."""
    text = refused(program, seen, variables, "--gpu_ids", gpus)
    for part in told:
        assert part.format(program) in text, text
    assert ("train.py" if program == "evaluate.py" else "evaluate.py") not in text
    assert ("slurm.sh --slurm.nodes 2 --slurm.gpus 4" in text) == (program == "train.py" and variables is SLURM)


@pytest.mark.parametrize("program", ["train.py", "evaluate.py"])
@pytest.mark.parametrize(
    ("variables", "gpus", "told"),
    [
        (TORCHRUN, "0", "torchrun --standalone --nproc-per-node=1 {} --gpu_ids 0 ..."),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"},
            "0,1,2,3",
            "torchrun --standalone --nproc-per-node=1 {}",
        ),
        (SLURM, "0,1,2", "srun --nodes=2 --ntasks-per-node=2 --gpus-per-node=2 python {} --gpu_ids 0,1 ..."),
        (MPI, "0", "mpirun -n 1 python {} --gpu_ids 0 ..."),
        ({}, "0,1", "python {} --gpu_ids 0 ..."),
    ],
    ids=["torchrun", "ids-too", "slurm", "mpi", "alone"],
)
def test_more_ranks_than_gpus(refused: Refused, program: str, variables: dict[str, str], gpus: str, told: str) -> None:
    """R-64, D-45: one GPU can be seen; the command for as many processes as there are GPUs."""
    seen = 2 if variables is SLURM else 1  # with one for each task, Slurm would be right
    text = refused(program, seen, variables, "--gpu_ids", gpus)
    assert told.format(program) in text, text


def test_no_launcher_wanted(refused: Refused) -> None:
    """R-64: several devices, and the one process was told to stand alone."""
    text = refused("train.py", 2, {}, "--gpu_ids", "0,1", "--dist.launcher", "none")
    assert "python train.py --dist.launcher auto --gpu_ids 0,1 ..." in text
