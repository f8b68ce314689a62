"""Which names are refused, how, and that nothing is left behind."""

import re
import time
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from cookiecutter.exceptions import FailedHookException, OutputDirExistsException
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support import TEMPLATE, fresh

BAD_PROJECTS = [
    "1st", "-x", "_x", "x-", "x_", "x y", "x.", "x ", " x", "é", "x\\y", "x:y", "x*", "class", "True", "import",
    "json", "Random", "common", "torch", "Torch", "con", "NUL", "com1", "lpt9", "x" * 65, "../x", "x/y", "~", '"""',
    "$HOME", "x\ny", "tqdm", "numpy", "PyYAML", "scikit_learn", "tensorboard",
]  # fmt: skip
BAD_CUSTOMS = [
    "", "1st", "_x", "my-code", "x.y", "x y", "x.", "../x", "x/y", "é", "class", "match", "json", "sys", "common",
    "Common", "torch", "numpy", "yaml", "PIL", "tests", "configs", "scripts", "data", "docs", "experiments", "train",
    "evaluate", "con", "Aux", "com1", "x" * 25, "Custom", "CUSTOM",
    "build", "dist", "env", "typing_extensions", "pluggy", "sympy", "optuna", "wandb", "mlflow", "onnx",
    "webdataset", "safetensors",
]  # fmt: skip
GOOD_PROJECTS = ["my_project", "spin-lab", "X", "a1", "x" * 64, "custom", "Torch-Lab", "my-common"]
GOOD_CUSTOMS = ["custom", "spinlab", "my_custom", "custom_code", "X", "x" * 24, "torchlab", "tes"]


@pytest.mark.parametrize("name", BAD_PROJECTS)
def test_bad_project_name_has_a_problem(pre_gen: ModuleType, name: str) -> None:
    assert pre_gen.problem_with_project(name)


@pytest.mark.parametrize("name", BAD_CUSTOMS)
def test_bad_custom_name_has_a_problem(pre_gen: ModuleType, name: str) -> None:
    assert pre_gen.problem_with_custom(name)


def test_good_names_have_none(pre_gen: ModuleType) -> None:
    assert [name for name in GOOD_PROJECTS if pre_gen.problem_with_project(name)] == []
    assert [name for name in GOOD_CUSTOMS if pre_gen.problem_with_custom(name)] == []


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"proj_name": "1st"}, "letter first"),
        ({"proj_name": "common"}, "already uses"),
        ({"proj_name": "../outside"}, "use letters, digits"),
        ({"proj_name": "json"}, "standard library"),
        ({"custom_name": "con"}, "Windows"),
        ({"custom_name": "class"}, "word of the Python language"),
        ({"custom_name": "x" * 25}, "25 characters"),
        ({"proj_name": "a/b/c"}, "use letters, digits"),
        ({"proj_name": "PyYAML"}, "package of that name"),
        ({"custom_name": "dist"}, "for a folder"),
        ({"custom_name": "pluggy"}, "for a library"),
        ({"description": "{{ 7*7 }}"}, "template language"),
        ({"author_name": "{% raw %}"}, "template language"),
        ({"custom_name": 'a"b\\'}, "Python package"),
        ({"custom_name": ""}, "Python package"),
        ({"description": "two\nlines"}, "one line"),
        ({"author_name": "a\x07b"}, "one line"),
        ({"_new_lines": "\r\n"}, "end in LF"),
    ],
    ids=str,
)
def test_refusal_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, settings: Path, capfd: pytest.CaptureFixture[str], answers: dict[str, str], words: str
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    with pytest.raises(FailedHookException):
        fresh(output, settings, **answers)
    (key, value), = answers.items()  # fmt: skip
    captured = capfd.readouterr().err
    lines = [line for line in captured.splitlines() if line.startswith(key)]
    assert len(lines) == 1
    assert lines[0].startswith(f"{key} {value!r} cannot be used: ")
    assert re.search(r"[^.]\.$", lines[0])
    assert words in lines[0]
    assert "Nothing was created; start again" in captured
    assert list(tmp_path.iterdir()) == [output]
    deadline = time.monotonic() + 10
    while list(output.iterdir()) and time.monotonic() < deadline:  # the parents of a/b/c go when cookiecutter is done
        time.sleep(0.05)
    assert list(output.iterdir()) == []


def test_no_package_hides_one_that_the_project_needs(pre_gen: ModuleType) -> None:
    """The modules and names of all that its requirements bring along, and of what the tests install, are refused."""
    wanted, todo = set[str](), [
        Requirement(line.partition("#")[0]).name
        for file in ("requirements.txt", "requirements-dev.txt")
        for line in (TEMPLATE / file).read_text(encoding="utf-8").splitlines()
        if line.partition("#")[0].strip()
    ]  # fmt: skip
    while todo:
        name = canonicalize_name(todo.pop())
        if name in wanted:
            continue
        wanted.add(name)
        requirements = [Requirement(text) for text in metadata.requires(name) or ()]
        todo += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert {"torch", "sympy", "pluggy"} <= wanted
    assert [name for name in wanted if not pre_gen.problem_with_project(name)] == []
    modules = {
        module
        for module, packages in metadata.packages_distributions().items()
        if wanted & {canonicalize_name(package) for package in packages} and re.fullmatch(r"[A-Za-z]\w*", module)
    }
    assert {"yaml", "typing_extensions", "sklearn"} <= modules
    assert [module for module in modules if not pre_gen.problem_with_custom(module)] == []


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_is_a_folder_already_is_refused(tmp_path: Path, settings: Path, name: str) -> None:
    """cookiecutter itself sees that these name a folder that exists, before any hook runs."""
    output = tmp_path / "out"
    output.mkdir()
    with pytest.raises(OutputDirExistsException):
        fresh(output, settings, proj_name=name)
    assert list(tmp_path.iterdir()) == [output]
    assert list(output.iterdir()) == []


def test_an_existing_project_is_not_overwritten(tmp_path: Path, settings: Path) -> None:
    """A second rendering stops."""
    project = fresh(tmp_path, settings)
    (project / "train.py").write_text("mine\n")
    with pytest.raises(OutputDirExistsException):
        fresh(tmp_path, settings)
    assert (project / "train.py").read_text() == "mine\n"
