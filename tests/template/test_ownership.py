"""What an owner is told to edit or delete leaves his tests green: none of them leans on what is his."""

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest

from support import NON_DEFAULT, REPO, TEMPLATE, Render
from test_leaves import COMBINATIONS
from test_project import JOBS, edit, follow_the_readme, run

# Of the parts that a project has at first. The rooms of tests about these parts go with them.
THEIR_OWN = ("tests/custom/", "tests/ops/", "tests/examples/")
SAMPLES = ("DigitsDataset", "ConvModel", "ClassificationTask")


def test_no_test_of_the_engine_names_a_sample() -> None:
    """Neither by an import nor as a `type`: samples are there to be renamed and deleted."""
    wrong = []
    for file in (TEMPLATE / "tests").rglob("*.py"):
        name, text = file.relative_to(TEMPLATE).as_posix(), file.read_text(encoding="utf-8")
        if not name.startswith(THEIR_OWN):
            wrong += [f"{name}: {module}" for module in imported(text) if module.split(".")[0] == "custom"]
            wrong += [f"{name}: {sample}" for sample in SAMPLES if re.search(rf"type: {sample}\b", text)]
    assert wrong == []
    base = (TEMPLATE / "tests" / "base.yaml").read_text(encoding="utf-8")
    assert [sample for sample in SAMPLES if sample in base] == []


def imported(text: str) -> set[str]:
    """Return the modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def everyday(project: Path) -> None:
    run(project, "make", "test", f"PYTHON={sys.executable}", f"JOBS={JOBS}")


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("parts", ["schema", pytest.param("some", marks=pytest.mark.full)])
def test_the_samples_may_be_deleted(render: Render, tmp_path: Path, parts: str) -> None:
    """Every part of custom/ goes with its tests, and the config names others: here those of the tests.

    Of a project with none of its leaves, or some of them.
    """
    some = COMBINATIONS["subset 0"]
    answers = {**some, "parts": f"{some['parts']} schema"} if parts == "some" else {"parts": parts, "examples": "none"}
    project = Path(shutil.copytree(render(**answers), tmp_path / "project"))
    for name in ("datasets", "models", "tasks", "loss", "metric"):
        shutil.rmtree(project / "custom" / name)
    shutil.rmtree(project / "tests" / "custom")
    edit(
        project / "custom" / "config.py",
        ('type="DigitsDataset", shift=1', 'type="tests.samples.Digits"'),
        (
            '\n    val: ValSection = default(type="DigitsDataset"',
            '\n    val: ValSection = default(type="tests.samples.Digits"',
        ),
        (
            '\n    eval: ValSection = default(type="DigitsDataset"',
            '\n    eval: ValSection = default(type="tests.samples.Digits"',
        ),
        ("ClassificationTask", "tests.samples.Classification"),
        ('type="ConvModel", in_channels=1, classes=10, width=32, dropout=0.1', 'type="tests.samples.Convolution"'),
        ('{"weight": 1.0, "label_smoothing": 0.0}', '{"type": "tests.samples.CrossEntropy"}'),
        ('{"k": 1}', '{"type": "tests.samples.Share"}'),
    )
    run(project, sys.executable, str(REPO / "tools" / "default_config.py"), ".")
    everyday(project)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("parts", ["schema images", pytest.param("all", marks=pytest.mark.full)])
def test_the_loop_and_the_defaults_may_be_edited(render: Render, tmp_path: Path, parts: str) -> None:
    """Eight lines in the loop, another name, length and rate in default.yaml, and every recipe of the
    README; in a project whose package has another name. The slow tests run where the template lies."""
    examples = "all" if parts == "all" else "none"
    answers = {**NON_DEFAULT, "parts": parts, "examples": examples}
    project = Path(shutil.copytree(render(**answers), tmp_path / "project"))
    follow_the_readme(project, project / NON_DEFAULT["custom_name"])
    text = (project / "configs" / "default.yaml").read_text(encoding="utf-8")
    (project / "configs" / "default.yaml").write_text(re.sub(r"(?m)^name: default", "name: mine", text))
    trainer = project / "common" / "trainer.py"
    found = re.search(r"(?m)^( +)self\.monitor\.step_done\(.*\n", trainer.read_text(encoding="utf-8"))
    assert found, "the line of the loop that ends a step"
    lines = ["mine = 0", *(f"mine += {number}" for number in range(6)), "assert mine == 15"]
    edit(trainer, (found[0], found[0] + "".join(f"{found[1]}{line}\n" for line in lines)))
    everyday(project)
