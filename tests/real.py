"""Real programs that tests need and a machine may lack: installed where we may, reported where we may not."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

import pytest

REPORT: list[str] = []  # what really ran, for the end of the test report


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
    for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *missing]):
        done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            _without(f"apt-get {' '.join(command)} failed: {done.stderr.strip()[-300:]}")


def _without(reason: str) -> None:
    if os.environ.get("REQUIRE_REAL"):
        pytest.fail(f"REQUIRE_REAL is set, but: {reason}")
    pytest.skip(reason)
