"""The C++ kernels, built once for all tests; without a compiler, or with OPS_BUILD_DIR set, what is there is tested."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from common.ops.toolchain import BuildError, find_compiler
from tests.conftest import ENVIRONMENT, PROJECT
from custom.ops import add_matrix  # noqa: F401 - defines the operators, whose kernels the library brings

OPS = PROJECT / "custom" / "ops"


def install(folder: Path = OPS, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the operators in `folder` as scripts/install_ops.sh does, without CUDA unless told otherwise."""
    variables = {**ENVIRONMENT, "FORCE_CUDA": "0", **environment}
    command = [sys.executable, "-m", "common.ops", str(folder)]
    return subprocess.run(command, cwd=PROJECT, env=variables, capture_output=True, text=True, timeout=300, check=False)


def has_compiler(environment: Mapping[str, str] = os.environ) -> bool:
    try:
        find_compiler(environment)
    except BuildError:
        return False
    return True


@pytest.fixture(scope="session")
def build_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the library lies that these tests use; the kernels are loaded, if there are any."""
    given = os.environ.get("OPS_BUILD_DIR")
    target = given or str(tmp_path_factory.mktemp("ops"))
    if given is None and has_compiler():
        done = install(OPS_BUILD_DIR=target)
        assert done.returncode == 0, done.stderr
    for library in Path(target).glob("*.so"):
        torch.ops.load_library(library)
    os.environ["OPS_BUILD_DIR"] = target
    yield target
    if given is None:
        del os.environ["OPS_BUILD_DIR"]
