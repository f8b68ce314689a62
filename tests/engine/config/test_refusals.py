"""Devices and processes that do not go together: refused, with what would be right."""

import os
from collections.abc import Callable

import pytest
import torch

from common.failure.program import report_errors
import evaluate
import train
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
        monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        main = train.main
        if program == "evaluate.py":
            main = evaluate.main
            words = ("--model_pt", "best.pt", *words)
        with pytest.raises(SystemExit) as ended, report_errors():
            main(["--config", str(CONFIG), *words])
        assert ended.value.code == 2
        return capsys.readouterr().err

    return call


@pytest.mark.parametrize("program", ["train.py", "evaluate.py"])
@pytest.mark.parametrize(
    ("seen", "variables", "gpus", "message"),
    [
        (4, TORCHRUN, "0,1,2", "names 3 device(s), but the launcher or dist.processes wants 2 process(es)"),
        (4, TORCHRUN, "0", "start 1, or name 2 device(s)"),
        (4, SLURM, "0,1,2,3", "start 4, or name 2 device(s)"),
        (4, MPI, "0,1,2", "start 3, or name 2 device(s)"),
        (1, TORCHRUN, "0,1", "PyTorch finds 1 CUDA device(s)"),
        (1, {}, "0,1", "PyTorch finds 1 CUDA device(s)"),
    ],
    ids=["more-devices", "fewer-devices", "slurm", "mpi", "more-than-seen", "alone"],
)
def test_as_many_processes_as_devices(
    refused: Refused, program: str, seen: int, variables: dict[str, str], gpus: str, message: str
) -> None:
    """Refused by each program, with what would be right."""
    assert message in refused(program, seen, variables, "--gpu_ids", gpus)


def test_no_launcher_wanted(refused: Refused) -> None:
    """Several devices, and the one process was set to stand alone."""
    text = refused("train.py", 2, {}, "--gpu_ids", "0,1", "--dist.launcher", "none")
    assert "names 2 device(s)" in text and "1 process(es)" in text
