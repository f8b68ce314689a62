"""The operators, built for this machine and trained. What each computes is checked by tests/template/test_gpus.py."""

from pathlib import Path

import pytest

from common.ops.toolchain import find_compiler
from engine.gpu.conftest import Device
from tests.ops.conftest import install

pytestmark = [pytest.mark.slow, pytest.mark.gpu("operators")]
OPS = ["--config", "configs/ops.yaml", "--precision.mode", "fp64"]


def test_built_and_trained(device: Device, tmp_path: Path) -> None:
    """By nvcc for a GPU; trained in 64 bits, what the Python reference gives."""
    assert find_compiler() is not None, "there is no C++ compiler on the PATH"
    folder = tmp_path / "ops"
    done = install(OPS_BUILD_DIR=str(folder), FORCE_CUDA="1" if device.is_gpu else "0")
    assert done.returncode == 0, done.stderr
    device.record("build", done.stdout.strip())
    built = device.train(*OPS, name="built", variables={"OPS_BUILD_DIR": str(folder)})
    reference = device.train(*OPS, name="reference", variables={"OPS_BUILD_DIR": "/nowhere"})
    assert ("CUDA for" if device.is_gpu else "C++ on the CPU") in built.log
    assert "scale_exp: Python reference" in reference.log
    assert built.losses == pytest.approx(reference.losses, rel=1e-7)
