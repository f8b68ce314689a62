"""scripts/install_ops.sh: from nothing, again, after an edit, without a compiler, with a mistake in a source."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.ops.__main__ import main
from tests.conftest import PROJECT
from tests.ops.conftest import OPS


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"CXX": "g++-of-tomorrow"}, "CXX=g++-of-tomorrow is not on the PATH"),
        ({"FORCE_CUDA": "1", "CUDA_HOME": "/nowhere"}, "FORCE_CUDA=1, but there is no nvcc; install the CUDA toolkit"),
    ],
)
def test_what_is_asked_for_and_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    words: str,
) -> None:
    """An error, and nothing is left behind."""
    for name, value in ({"FORCE_CUDA": "0", "OPS_BUILD_DIR": str(tmp_path / "build")} | variables).items():
        monkeypatch.setenv(name, value)
    assert main([str(OPS)]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "build").exists()


def test_without_pytorch() -> None:
    """One line instead of a traceback."""
    done = call(sys.executable, "-S", "-m", "common.ops", "custom/ops")
    assert done.returncode == 2
    assert "not installed for this Python" in done.stderr and "Traceback" not in done.stderr


def test_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    done = call("sh", "scripts/install_ops.sh", "--cuda")
    assert done.returncode == 2 and "--cuda: it takes no arguments" in done.stderr
    done = call("sh", "scripts/install_ops.sh", "--help")
    assert done.returncode == 0 and "FORCE_CUDA=1" in done.stdout and "set -eu" not in done.stdout
    assert main([str(PROJECT / "scripts")]) == 2
    assert "FOLDER must have sources in src/" in capsys.readouterr().err


def call(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
