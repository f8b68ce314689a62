"""The rendered project on real GPUs, where there are any: one, and two with nccl between them."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from real import REPORT, need, need_gpus, need_nvcc, nvcc_version
from support import Render

pytestmark = pytest.mark.slow

# No dropout and no batch norm: then only rounding depends on the device, and on how many processes share a step.
SMALL = [
    "--config", "configs/default.yaml", "--debug.max_samples", "160", "--progress.epoch", "2",
    "--progress.epoch_eval", "-1", "--monitor.writers", "[]",
]  # fmt: skip
PLAIN = ["--model", "{$REPLACE: true, type: tests.small.Plain}"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@dataclass(frozen=True)
class Project:
    """A rendered project."""

    root: Path

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHON": sys.executable, **variables}
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=300,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def train(self, name: str, batch_size: int, *words: str, start: tuple[str, ...] = (sys.executable,)) -> str:
        """Train to a good end; what the log says."""
        done = self.run(*start, "train.py", *SMALL, "--name", name, "--batch_size", str(batch_size), *words)
        assert done.returncode == 0, done.stderr
        return (self.root / "experiments" / name / "train.log").read_text()

    def state(self, name: str) -> dict[str, Any]:
        file = self.root / "experiments" / name / "checkpoints" / "latest.pt"
        return dict(torch.load(file, weights_only=True, map_location="cpu"))

    def assert_same(self, first: str, second: str, tolerance: float) -> None:
        weights = self.state(second)["model"]
        for key, value in self.state(first)["model"].items():
            assert (value - weights[key]).abs().max() < tolerance, key


@pytest.fixture(scope="module")
def project(render: Render, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(Path(shutil.copytree(render(), tmp_path_factory.mktemp("gpus") / "project")))


@pytest.mark.gpu("cpu")
def test_one_gpu_trains_as_the_cpu_does(project: Project) -> None:
    """By gpu.sh; equal weights, within 1e-4; evaluate.py finds the same number on both."""
    need_gpus(1)
    project.train("cpu", 32, *PLAIN, "--gpu_ids", "-1")
    done = project.run("sh", "scripts/gpu.sh", *SMALL, *PLAIN, "--name", "gpu", "--batch_size", "32", GPUS="0")
    assert done.returncode == 0, done.stderr
    assert "on cuda:0" in done.stderr
    project.assert_same("cpu", "gpu", 1e-4)
    tables = []
    for ids in ("0", "-1"):
        best = project.root / "experiments" / "gpu" / "checkpoints" / "best.pt"
        done = project.run(sys.executable, "evaluate.py", "--model_pt", str(best), "--gpu_ids", ids)
        assert done.returncode == 0, done.stderr
        tables.append(re.search(r"Accuracy +([\d.]+)", done.stdout))
    assert tables[0] is not None
    assert tables[1] is not None
    assert tables[0][1] == tables[1][1]
    REPORT.append(f"one GPU ({torch.cuda.get_device_name(0)}): the same weights as the CPU")


@pytest.mark.gpu("nccl")
def test_more_processes_than_gpus(project: Project) -> None:
    """Refused, not shared."""
    need_gpus(1)
    count = torch.cuda.device_count() + 1
    launcher = [*TORCHRUN[:-1], f"--nproc-per-node={count}"]
    done = project.run(*launcher, "train.py", *SMALL, "--gpu_ids", "all")
    assert done.returncode != 0
    assert f"wants {count} process(es) on this host, and each needs one device" in done.stderr


@pytest.mark.gpu("nccl")
@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_two_gpus_train_as_one_does(project: Project, launcher: str) -> None:
    """Nccl, one process on each; equal weights at one global batch, within 1e-5."""
    need_gpus(2)
    project.train("one", 32, *PLAIN, "--gpu_ids", "0", "--resume", "auto")
    start = (sys.executable,) if launcher == "spawn" else tuple(TORCHRUN)
    log = project.train(launcher, 16, *PLAIN, "--gpu_ids", "0,1", start=start)
    assert "rank 0 of 2 on cuda:0" in log
    project.assert_same("one", launcher, 1e-5)
    REPORT.append(f"two GPUs by {launcher}, nccl")


@pytest.mark.gpu("fsdp")
@pytest.mark.parametrize(
    "words",
    [
        ["--dist.sync_bn", "true"],
        [*PLAIN, "--dist.strategy", "fsdp", "--prepare.fsdp.cpu_offload", "true"],
        [*PLAIN, "--dist.strategy", "fsdp", "--precision.mode", "bf16"],
    ],
    ids=["sync_bn", "fsdp, offload", "fsdp, bf16"],
)
def test_what_two_gpus_can(project: Project, words: list[str], request: pytest.FixtureRequest) -> None:
    """Batch norm over both; weights shared out between both."""
    need_gpus(2)
    name = re.sub(r"\W+", "_", request.node.name)
    assert "finished at epoch 2" in project.train(name, 16, "--gpu_ids", "0,1", *words)


@pytest.mark.gpu("nccl")
def test_a_failure_on_two_gpus(project: Project, tmp_path: Path) -> None:
    """No process waits for nccl."""
    need_gpus(2)
    broke = tmp_path / "broke"
    words = ["--model", "{$REPLACE: true, type: tests.small.Breaks}", "--gpu_ids", "0,1", "--name", "failing"]
    variables = {"BREAKS": "raise 1 train 5", "BROKE": str(broke)}
    done = project.run(sys.executable, "train.py", *SMALL, *words, **variables)
    assert time.time() - broke.stat().st_mtime < 10
    assert done.returncode == 1
    assert "rank 1 failed" in done.stderr


@pytest.fixture(scope="module")
def operators(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the library of the operators: with CUDA for the GPUs of this machine, where there are any."""
    if shutil.which("c++") is None:
        need({"g++": ["c++"]})
    folder = tmp_path_factory.mktemp("operators")
    force = "1" if torch.cuda.is_available() and nvcc_version() else "0"
    done = project.run("sh", "scripts/install_ops.sh", OPS_BUILD_DIR=str(folder), FORCE_CUDA=force)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.gpu("operators")
@pytest.mark.parametrize(
    ("device", "gpus"), [pytest.param("cpu", 0, marks=pytest.mark.full), ("cuda", 1), ("cuda:1", 2)]
)
def test_operators(project: Project, operators: Path, device: str, gpus: int) -> None:
    """Values, gradients, layouts, autocast, compilation, streams, on the tensor's device.

    On the CPU as well: what only a GPU can show to be right, is then known to run.
    """
    need_gpus(gpus)
    if gpus:
        need_nvcc()
    checks = Path(__file__).with_name("ops_checks.py")
    variables = {"OPS_BUILD_DIR": str(operators), "PYTHONPATH": str(project.root)}
    done = project.run(sys.executable, str(checks), device, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed: ") >= 9
    if gpus:
        times = done.stdout[done.stdout.index("times: ") :]
        REPORT.append(f"operators on {device} ({torch.cuda.get_device_name(device)}):\n{times}")
