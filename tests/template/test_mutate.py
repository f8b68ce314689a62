"""`make mutate`, on a repository of one module and two tests."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import REPO, TEMPLATE

CODE = "class Sum:\n    def add(self, a, b):\n        return a + b\n\n\ndef double(a):\n    return a + a\n"
TESTS = """from code_ import Sum


def test_add():
    assert Sum().add(2, 3) == 5


def test_two():
    assert Sum().add(2, 2) == 4
"""
FAULTS = """# Of sums.

- fault: a difference
  code: code_.py::Sum.add
  text: a + b
  becomes: a - b
  test: tests/test_code.py::test_add

- fault: a product
  code: code_.py::Sum.add
  text: a + b
  becomes: a * b
  test: tests/test_code.py::test_two

- fault: a text that is gone
  code: code_.py::double
  text: a + b
  becomes: a - b
  test: tests/test_code.py::test_two
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Where the tool breaks code: a folder that git knows, with the tool in it."""
    for name, text in {"code_.py": CODE, "tests/test_code.py": TESTS}.items():
        file = tmp_path / TEMPLATE.name / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for name in ("tools", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "tests" / "faults.yaml").write_text(FAULTS)
    shutil.copy(REPO / "tools" / "mutate.py", tmp_path / "tools")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def mutate(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "tools" / "mutate.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_fault_is_caught_or_missed(repository: Path) -> None:
    done = mutate(repository)
    assert done.returncode == 1, done.stderr
    assert "caught    a difference" in done.stdout
    assert "missed    a product" in done.stdout
    assert "skipped   a text that is gone: code_.py::double has the text 0 times: a + b" in done.stdout
    assert "1 of 2 faults are caught" in done.stdout


def test_a_fault_whose_text_is_gone_is_dropped(repository: Path) -> None:
    assert mutate(repository, "--check").returncode == 0
    assert (repository / "tests" / "faults.yaml").read_text() == FAULTS
    assert "a text that is gone" in mutate(repository, "--drop").stdout
    kept = FAULTS.partition("\n- fault: a text that is gone")[0]
    assert (repository / "tests" / "faults.yaml").read_text() == kept
    assert mutate(repository, "--check").stdout == ""
