"""scripts/install_ops.sh: from nothing, again, after an edit, without a compiler, with a mistake in a source."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.ops.conftest import NEEDS_COMPILER, install
from tests.ops.test_build import PACKAGE, script


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what a build needs, to be edited."""
    ignore = shutil.ignore_patterns("__pycache__", "build")
    for folder in ("common", PACKAGE, "scripts", "library", "parts", "cli", "tools"):
        shutil.copytree(PROJECT / folder, tmp_path / folder, ignore=ignore)
    for source in (tmp_path / PACKAGE / "ops" / "src").iterdir():
        if not source.name.startswith(("kernels", "add_matrix", "launch")):
            source.unlink()  # one operator is enough, and compiles in half the time
    return tmp_path


@pytest.mark.slow
@NEEDS_COMPILER
def test_only_what_changed_is_compiled_again(project: Path) -> None:
    """An edited source alone; after an edited header, each; what no source needs any more is removed."""
    folder = project / PACKAGE / "ops"
    source, other = folder / "src" / "add_matrix.cpp", folder / "src" / "second.cpp"
    other.write_text(source.read_text().replace("add_matrix", "second").replace("STABLE_TORCH", "// STABLE_TORCH"))

    def build() -> dict[str, tuple[str, int]]:
        done = script(project)
        assert done.returncode == 0 and "built in" in done.stdout, done.stderr
        objects = (folder / "build" / "objects").iterdir()
        return {each.name.split("-")[0]: (each.name, each.stat().st_mtime_ns) for each in objects}

    first = build()
    assert first.keys() == {"add_matrix.cpp", "second.cpp"}
    source.write_text(source.read_text() + "// edited\n")
    second = build()
    assert second["second.cpp"] == first["second.cpp"] and second["add_matrix.cpp"] != first["add_matrix.cpp"]
    header = folder / "src" / "kernels.h"
    header.write_text(header.read_text() + "// edited\n")
    third = build()
    assert all(third[name] != second[name] for name in second)
    other.unlink()
    assert build() == {"add_matrix.cpp": third["add_matrix.cpp"]}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"CXX": "g++-of-tomorrow"}, "CXX=g++-of-tomorrow is not on the PATH"),
        ({"FORCE_CUDA": "1", "CUDA_HOME": "/nowhere"}, "FORCE_CUDA=1, but there is no nvcc; install the CUDA toolkit"),
    ],
)
def test_what_is_asked_for_and_missing(tmp_path: Path, variables: dict[str, str], words: str) -> None:
    """An error, and nothing is left behind."""
    done = install(OPS_BUILD_DIR=str(tmp_path / "build"), **variables)
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "build").exists()


def test_without_pytorch() -> None:
    """One line instead of a traceback."""
    done = call(sys.executable, "-S", "-m", "common.ops", "custom/ops")
    assert done.returncode == 2
    assert "not installed for this Python" in done.stderr and "Traceback" not in done.stderr


def test_arguments_are_refused() -> None:
    done = call("sh", "scripts/install_ops.sh", "--cuda")
    assert done.returncode == 2 and "--cuda: it takes no arguments" in done.stderr
    done = call("sh", "scripts/install_ops.sh", "--help")
    assert done.returncode == 0 and "FORCE_CUDA=1" in done.stdout and "set -eu" not in done.stdout
    done = install(PROJECT / "scripts")
    assert done.returncode == 2 and "FOLDER must have sources in src/" in done.stderr


def call(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
