"""Real programs that tests need and a machine may lack: installed where we may, reported where we may not."""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch

REPORT: list[str] = []  # what really ran, for the end of the test report
NOT_RUN: list[str] = []  # what could not, and why


def need(packages: Mapping[str, Sequence[str]]) -> None:
    """Have the programs of some Debian packages, or skip the test with the reason; with REQUIRE_REAL set, fail.

    Args:
        packages: package -> programs of it that are called.
    """
    if not (os.name == "posix" and os.geteuid() == 0):
        _without("needs root, for installing packages and for network namespaces")
    missing = [name for name, programs in packages.items() if not all(map(shutil.which, programs))]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        _without(f"{', '.join(missing)} are not installed, and there is no apt-get to install them")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with Path(tempfile.gettempdir(), "installing_for_tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be installing
        for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *missing]):
            done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                _without(f"apt-get {' '.join(command)} failed: {done.stderr.strip()[-300:]}")


def need_gpus(count: int) -> None:
    """Have so many GPUs, or skip the test with the reason. It cannot be installed, so REQUIRE_REAL asks for none."""
    there = torch.cuda.device_count()
    if there < count:
        _not_run("no GPU" if there == 0 else f"{there} GPU, and it needs {count}")


def need_nvcc() -> str:
    """Return the version of CUDA's compiler, or skip the test with the reason.

    Few machines have it, so REQUIRE_REAL does not ask for it either.
    """
    version = nvcc_version()
    if version is None:
        _not_run("no nvcc")
    return version


def nvcc_version() -> str | None:
    """Return the version of CUDA's compiler, such as 13.0.88; None where there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [f"{home}/bin"] if home else [os.environ["PATH"], "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d[\d.]*)", said)
    return found[1] if found else said.strip()


def _not_run(reason: str) -> NoReturn:
    NOT_RUN.append(f"{os.environ['PYTEST_CURRENT_TEST'].rpartition(' ')[0]}: {reason}")
    pytest.skip(f"not run: {reason}")


def _without(reason: str) -> None:
    if os.environ.get("REQUIRE_REAL"):
        pytest.fail(f"REQUIRE_REAL is set, but: {reason}")
    pytest.skip(reason)
