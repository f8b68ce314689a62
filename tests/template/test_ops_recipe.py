"""What custom/ops/README.md asks of its reader, done to the letter in a rendered project."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from real import REPORT
from support import Render

pytestmark = pytest.mark.slow

RECIPE = "## 4. Add your own operator"
REDUCTION = "## 5. A reduction"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?:#|//) (\S+/\S+\.(?:py|cpp|cu))\n")  # the first line of a block that is a file
NEEDS_GPU = ("ncu ",)  # commands that cannot run without one
NVCC = shutil.which("nvcc") is not None
KERNELS = """
import torch, {name}.ops
print(*(key for key in ("CPU", "CUDA")
        if torch._C._dispatch_has_kernel_for_dispatch_key("custom_ops::{operator}", key)))
"""


@dataclass(frozen=True)
class Project:
    """A rendered project, and how its reader's terminal is set up."""

    root: Path
    package: str  # what `custom` is called in it
    environment: Mapping[str, str]

    def run(self, *command: str, **variables: str) -> str:
        """Run in the project's folder, to a good end. Returns what was printed."""
        done = subprocess.run(
            command, cwd=self.root, env={**self.environment, **variables}, capture_output=True, text=True,
            timeout=900, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def shell(self, lines: str, **variables: str) -> str:
        return self.run("sh", "-euc", lines, **variables)

    @property
    def guide(self) -> str:
        return (self.root / self.package / "ops" / "README.md").read_text(encoding="utf-8")

    def kernels(self, operator: str = "soft_threshold") -> list[str]:
        """Return the dispatch keys for which a compiled operator is registered."""
        return self.run(sys.executable, "-c", KERNELS.format(name=self.package, operator=operator)).split()

    def check_style(self, python: list[str], name: str) -> None:
        sources = self.root / self.package / "ops" / "src"
        self.run(sys.executable, "-m", "ruff", "check", "--no-cache", *python)
        self.run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *python)
        self.run(clang_format(), "--dry-run", "-Werror", *map(str, sources.glob(f"{name}.*")))


@pytest.fixture
def project(request: pytest.FixtureRequest, render: Render, tmp_path: Path) -> Project:
    """A copy: the recipe adds to it. `python` is this interpreter, and no variable of ours reaches the build."""
    answers: dict[str, str] = getattr(request, "param", {})
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (programs / "python").chmod(0o755)
    ours = {"FORCE_CUDA", "TORCH_CUDA_ARCH_LIST", "OPS_BUILD_DIR"}
    kept = {key: value for key, value in os.environ.items() if key not in ours and not key.startswith("PYTEST_")}
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    root = Path(shutil.copytree(render(**answers), tmp_path / "project"))
    name = answers.get("custom_name", "custom")
    return Project(root, name, {**kept, "PATH": path, "PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"})


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, content) of every fenced block, in order."""
    yield from BLOCK.findall(text)


def split(guide: str, heading: str) -> tuple[str, str]:
    """Return the section below a heading, and the rest."""
    start = guide.index(heading)
    end = guide.index("\n## ", start)
    return guide[start:end], guide[:start] + guide[end:]


@pytest.mark.parametrize(
    "project",
    [pytest.param({}, marks=pytest.mark.full), {"custom_name": "spinlab"}],
    ids=["default", "spinlab"],
    indirect=True,
)
def test_the_recipe_to_the_letter(project: Project) -> None:
    """Files as shown, commands as shown; Python first, then C++, then CUDA.

    Under another name CUDA is left out, as on a machine that has none.
    """
    cuda = NVCC and project.package == "custom"
    written: list[str] = []
    outputs: list[tuple[int, str]] = []  # (files written by then, what a command printed)
    for language, text in blocks(split(project.guide, RECIPE)[0]):
        if found := FILE.match(text):
            path = project.root / found[1]
            assert path.exists() == (path.name == "__init__.py"), found[1]
            path.write_text(text, encoding="utf-8")
            written.append(found[1])
            continue
        assert language == "sh", text
        if len(written) == 3:
            assert project.kernels() == []  # so this first run of the test is one of the reference
        # nvcc takes most of the time, so it runs once the kernel is there.
        force = "1" if cuda and written[-1].endswith(".cu") else "0"
        outputs.append((len(written), project.shell(text, FORCE_CUDA=force)))
        if len(written) == 4:
            assert project.kernels() == ["CPU"]
    files = ["soft_threshold.py", "__init__.py", "test_soft_threshold.py", "soft_threshold.cpp", "soft_threshold.cu"]
    assert [Path(each).name for each in written] == files
    assert project.kernels() == (["CPU", "CUDA"] if cuda else ["CPU"])

    reference, cpp, gpu, compared = (printed for _, printed in outputs)
    assert [count for count, _ in outputs] == [3, 4, 5, 5]
    # The skipped ones ask whether the C++ kernel and the CUDA kernel are in the library.
    for printed, skipped in ((reference, 2), (cpp, 1), (gpu, 0 if cuda else 1)):
        assert re.search(rf"^\d+ passed{f', {skipped} skipped' if skipped else ''} in", printed, re.MULTILINE), printed
    assert re.search(r"C\+\+ .*\bsoft_threshold\.cpp", cpp)
    assert not cuda or re.search(r"CUDA .*\bsoft_threshold\.cu for ", gpu)
    assert re.search(r"(\d+) of \1 cases agree\n", compared)

    project.check_style(written[:3], "soft_threshold")
    REPORT.append(f"the recipe for an operator, {'with nvcc' if cuda else 'C++ alone'}")


@pytest.mark.full
def test_the_reduction_to_the_letter(project: Project) -> None:
    """Two inputs, a backward kernel, vector loads and shared memory; with the reference first, then built."""
    written: list[str] = []
    commands: list[str] = []
    for language, text in blocks(split(project.guide, REDUCTION)[0]):
        if found := FILE.match(text):
            (project.root / found[1]).write_text(text, encoding="utf-8")
            written.append(found[1])
        else:
            assert language == "sh", text
            commands.append(text)
    names = ["rms_norm.py", "test_rms_norm.py", "rms_norm.cpp", "rms_norm.cu"]
    assert [Path(each).name for each in written] == names
    (command,) = commands
    init = project.root / project.package / "ops" / "__init__.py"
    text = init.read_text(encoding="utf-8").replace('"implementation", ', '"implementation", "rms_norm", ')
    line = f"from {project.package}.ops.scale_exp import"
    text = text.replace(line, f"from {project.package}.ops.rms_norm import rms_norm\n{line}")
    init.write_text(text, encoding="utf-8")
    assert project.kernels("rms_norm") == []
    project.run(sys.executable, "-m", "pytest", "-q", "tests/test_rms_norm.py")
    assert "16 of 16 cases agree" in project.shell(command, FORCE_CUDA="1" if NVCC else "0")
    assert project.kernels("rms_norm") == project.kernels("rms_norm_backward") == ["CPU", *["CUDA"] * NVCC]
    project.check_style([*written[:2], str(init)], "rms_norm")


@pytest.mark.full
@pytest.mark.parametrize("project", [{"parts": "kernels_on_cpu"}], indirect=True)
def test_the_two_wrong_kernels(project: Project) -> None:
    """What the page shows of an index out of range and of a missing barrier is what is printed."""
    page = (project.root / "docs" / "tools" / "kernels_on_cpu.md").read_text(encoding="utf-8")
    (commands,) = (text for language, text in blocks(page) if language == "sh")
    assert project.shell(commands).count("64 of 64 cases agree") == 3  # as they are, and with two sanitizers
    for _, text in blocks(split(project.guide, REDUCTION)[0]):
        found = FILE.match(text)
        if found is not None:
            (project.root / found[1]).write_text(text, encoding="utf-8")
    init = project.root / "custom" / "ops" / "__init__.py"
    init.write_text(init.read_text() + 'from custom.ops.rms_norm import rms_norm\n\n__all__ += ["rms_norm"]\n')
    for name, right, wrong in (("scale_exp", "i < count", "i <= count"), ("rms_norm", "__sync", "// __sync")):
        source = project.root / "custom" / "ops" / "src" / f"{name}.cu"
        source.write_text(source.read_text().replace(right, wrong, 1))
    reports = re.findall(r"^  ```text\n(.*?)^  ```$", page, re.MULTILINE | re.DOTALL)
    for name, report in zip(("scale_exp", "rms_norm"), reports, strict=True):
        command = [sys.executable, "-m", "tools.kernels_on_cpu", name, "--sanitize"]
        done = subprocess.run(
            command, cwd=project.root, env=project.environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 1
        assert textwrap.dedent(report) in done.stderr


@pytest.mark.full
def test_every_other_snippet_runs(project: Project) -> None:
    """In the order in which they stand, each as shown."""
    ran = []
    rest = split(split(project.guide, RECIPE)[1], REDUCTION)[1]
    for language, text in blocks(rest):
        if language == "sh" and not text.startswith(NEEDS_GPU):
            ran.append(project.shell(text, FORCE_CUDA="0"))
        elif language == "python":
            ran.append(project.run(sys.executable, "-c", text))
            (project.root / "snippet.py").write_text(text, encoding="utf-8")
            project.run(sys.executable, "-m", "ruff", "check", "--no-cache", "snippet.py")
            project.run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "snippet.py")
    assert len(ran) == 3
    assert "64 of 64 cases agree" in ran[0]
    assert "custom_ops::scale_exp" in ran[2]  # a row of the profile
    log = (project.root / "experiments" / "ops" / "train.log").read_text()
    assert "scale_exp: C++ on the CPU" in log
    assert (project.root / "custom" / "ops" / "build" / "compile_commands.json").is_file()


def clang_format() -> str:
    beside = Path(sys.executable).with_name("clang-format")
    found = str(beside) if beside.is_file() else shutil.which("clang-format")
    assert found is not None, "clang-format is missing: python -m pip install clang-format"
    return found
