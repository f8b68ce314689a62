"""scripts/install_ops.sh: from nothing, again, after an edit, without a compiler, with a mistake in a source."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT, PROJECT
from tests.ops.conftest import NEEDS_COMPILER, install

PACKAGE = Path("custom/ops").parts[0]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what a build needs, to be edited."""
    ignore = shutil.ignore_patterns("__pycache__", "build")
    for folder in ("common", PACKAGE, "scripts", "library", "cli", "tools"):
        shutil.copytree(PROJECT / folder, tmp_path / folder, ignore=ignore)
    for source in (tmp_path / PACKAGE / "ops" / "src").iterdir():
        if not source.name.startswith(("kernels", "add_matrix", "launch")):
            source.unlink()  # one operator is enough, and compiles in half the time
    return tmp_path


def script(project: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**ENVIRONMENT, "PYTHON": sys.executable, "PYTHONPATH": "", "FORCE_CUDA": "0", **environment}
    variables.pop("OPS_BUILD_DIR", None)
    command = [shutil.which("dash") or "sh", str(project / "scripts" / "install_ops.sh")]
    return subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True, timeout=300, check=False)


def status(project: Path) -> str:
    """Return what a training would log, in a process of its own."""
    code = "from custom.ops import implementation; print(implementation)"
    environment = {**ENVIRONMENT, "PYTHONPATH": str(project)}
    environment.pop("OPS_BUILD_DIR", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


@pytest.mark.slow
@NEEDS_COMPILER
def test_from_nothing_twice_and_after_an_edit(project: Path) -> None:
    """What is current is left alone; an edited source is noticed, never loaded, and built again."""
    folder = project / PACKAGE / "ops"
    assert "Python reference (nothing is built; sh scripts/install_ops.sh builds" in status(project)
    done = script(project)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (
        "built in" in done.stdout
        and "C++   add_matrix.cpp\n" in done.stdout
        and "CUDA  none: FORCE_CUDA=0" in done.stdout
    )
    (library,) = (folder / "build").glob("*.so")
    before = library.stat().st_mtime_ns
    assert f"C++ on the CPU, Python reference on a GPU ({PACKAGE}/ops/build/{library.name})" in status(project)

    done = script(project)
    assert done.returncode == 0 and "up to date" in done.stdout
    assert library.stat().st_mtime_ns == before

    source = folder / "src" / "add_matrix.cpp"
    source.write_text(source.read_text() + "// edited\n")
    assert "the build is out of date: a source" in status(project)
    done = script(project)
    assert done.returncode == 0 and "built in" in done.stdout
    (newer,) = (folder / "build").glob("*.so")
    assert newer.name != library.name and "C++ on the CPU" in status(project)
    assert sorted(each.name for each in (folder / "build").iterdir()) == ["compile_commands.json", newer.name]

    newer.write_bytes(b"not a library")
    assert "cannot be loaded; the Python reference runs" in status(project)


@NEEDS_COMPILER
def test_a_mistake_in_a_source(project: Path) -> None:
    """The compiler's first error, and the line it is about. Editors know the paths."""
    source = project / PACKAGE / "ops" / "src" / "add_matrix.cpp"
    line = source.read_text().splitlines().index("Tensor add_matrix(const Tensor& a, const Tensor& b) {") + 1
    source.write_text(source.read_text().replace("Tensor out = torch::stable::empty_like(x);", "Tensor out = empty(x;"))
    done = script(project)
    assert done.returncode == 1
    assert f"add_matrix.cpp:{line + 5}" in done.stderr and done.stderr.count("error: ") == 2  # the first one alone
    assert "empty(x;" in done.stderr and "Traceback" not in done.stderr
    made = project / PACKAGE / "ops" / "build" / "compile_commands.json"
    assert list(made.parent.iterdir()) == [made]
    (entry,) = json.loads(made.read_text())
    include = entry["arguments"][entry["arguments"].index("-isystem") + 1]
    assert Path(include, "torch", "csrc", "stable", "tensor.h").is_file()
    assert Path(entry["directory"], entry["file"]).samefile(source)


def test_without_a_compiler(tmp_path: Path) -> None:
    """Said with the remedy, and no error: a script that trains next does so, on the reference."""
    done = install(OPS_BUILD_DIR=str(tmp_path / "build"), PATH="/nowhere")
    assert done.returncode == 0 and done.stderr == ""
    assert "nothing is built, since there is no C++ compiler on the PATH" in done.stdout
    assert "run in Python" in done.stdout and "apt install g++" in done.stdout
    assert not (tmp_path / "build").exists()
