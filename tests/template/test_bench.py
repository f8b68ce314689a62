"""The programs of bench/ run, in their smallest sizes. What they measure then means nothing."""

import os
import subprocess
import sys

import pytest

from support import REPO

pytestmark = pytest.mark.slow

SMALLEST = {
    "ddp.py": "--segments 2 --steps 5",
    "gpu.py": "--device cpu --tiny --models vit_s gpt_124m --modes eager --segments 2 --steps 2",
    "loop.py": "--segments 2 --steps 10",
    "reduction.py": "--segments 2 --steps 2 --ranks 2 --leaves 2",
    "resume.py": "--runs 1 --size 100000",
    "save.py": "--runs 1 --megabytes 10",
    "shared_list.py": "--records 1000 --workers 1",
    "start.py": "--runs 1",
}


FEW = [pytest.param(name, marks=() if name in ("loop.py", "save.py") else pytest.mark.full) for name in SMALLEST]


@pytest.mark.parametrize("name", FEW)
def test_a_bench_runs(name: str) -> None:
    command = [sys.executable, f"bench/{name}", *SMALLEST[name].split()]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    words = {"ddp.py": "throughput"}
    assert words.get(name, "ratio") in done.stdout


def test_every_bench_is_run() -> None:
    """But that of the operators, which need a compiler, that of other trainers, which are not installed, and models."""
    assert {path.name for path in (REPO / "bench").glob("*.py")} == {*SMALLEST, "ops.py", "peers.py", "gpu_models.py"}
