"""The kernels, built once for all tests; without a compiler, or with OPS_BUILD_DIR set, what is there is tested."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock  # comes with torch

from common.ops.toolchain import find_compiler
from tests.conftest import ENVIRONMENT, PROJECT
from custom.ops import add_matrix  # noqa: F401 - defines the operators, whose kernels the library brings

OPS = PROJECT / "custom" / "ops"


def install(folder: Path = OPS, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the operators in `folder` as scripts/install_ops.sh does, without CUDA unless asked."""
    variables = {**ENVIRONMENT, "FORCE_CUDA": "0", **environment}
    command = [sys.executable, "-m", "common.ops", str(folder)]
    return subprocess.run(command, cwd=PROJECT, env=variables, capture_output=True, text=True, timeout=300, check=False)


NEEDS_COMPILER = pytest.mark.skipif(
    find_compiler() is None and not os.environ.get("REQUIRE_REAL"), reason="there is no C++ compiler on the PATH"
)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the library lies that these tests use; the kernels are loaded, if there are any."""
    target = os.environ.get("OPS_BUILD_DIR")
    if target is None:
        folder = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            folder = folder.parent  # one build for all of them: the first builds it, the others find it
        target = str(folder / "ops")
        if find_compiler() is not None:
            with FileLock(f"{target}.lock"):
                done = install(OPS_BUILD_DIR=target, FORCE_CUDA="")  # CUDA if there are nvcc and a GPU
            assert done.returncode == 0, done.stderr
    for library in Path(target).glob("*.so"):
        ctypes.CDLL(str(library))  # torch.ops.load_library would make it a part of what runs in later tests record
    return target


@pytest.fixture
def build_dir(built: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, for programs that a test starts, too."""
    monkeypatch.setenv("OPS_BUILD_DIR", built)
    return built
