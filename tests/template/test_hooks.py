"""The hook that drops and renames: exactly what it should, and again without harm."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from cookiecutter.main import cookiecutter

from support import NON_DEFAULT, REPO, TEMPLATE, files, fresh, hook_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RENAMED = [
    ("from custom.models import x", "from spinlab.models import x"),
    ("    from custom.models.a import b", "    from spinlab.models.a import b"),
    ("from custom import task", "from spinlab import task"),
    ("    from custom import task", "    from spinlab import task"),
    ("import custom", "import spinlab"),
    ("import custom.task as t", "import spinlab.task as t"),
    ("import custom as c", "import spinlab as c"),
    ('scan("custom.models", "_model.py")', 'scan("spinlab.models", "_model.py")'),
    ("type: custom.models.a.Model", "type: spinlab.models.a.Model"),
    ("custom/models/*_model.py", "spinlab/models/*_model.py"),
    ("in ./custom/task.py", "in ./spinlab/task.py"),
    ("(custom/)", "(spinlab/)"),
    ('include = ["common", "custom", "custom.*"]', 'include = ["common", "spinlab", "spinlab.*"]'),
    ('["custom*"]', '["spinlab*"]'),
    ("Path('custom')", "Path('spinlab')"),
    ("`common` never imports `custom`", "`common` never imports `spinlab`"),
    ('{"description": "not \\"custom\\""}', '{"description": "not \\"spinlab\\""}'),
    ("--dir=custom/x custom/y", "--dir=spinlab/x spinlab/y"),
]
KEPT = [
    "customise", "custom_name", "my_custom", "a custom loss", "accustom", "custom-made", "self.custom.x", "Custom",
    "the import of custom ops", "my-custom/x", "CUSTOM", "custom. Then", "configs/custom.yaml", "customary/x",
    "from custom made parts",
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), RENAMED)
def test_package_and_paths_are_renamed(post_gen: ModuleType, before: str, after: str) -> None:
    assert post_gen.CUSTOM.sub("spinlab", before) == after
    assert post_gen.CUSTOM.sub("spinlab", f"one\n{before}\ntwo\n") == f"one\n{after}\ntwo\n"


@pytest.mark.parametrize("text", KEPT)
def test_other_words_are_kept(post_gen: ModuleType, text: str) -> None:
    assert post_gen.CUSTOM.sub("spinlab", text) == text


@pytest.mark.parametrize("name", ["my_custom", "custom_code"])
def test_a_name_that_contains_custom_is_not_renamed_again(post_gen: ModuleType, name: str) -> None:
    for before, _ in RENAMED:
        once = post_gen.CUSTOM.sub(name, before)
        assert post_gen.CUSTOM.sub(name, once) == once


def run_hook(project: Path, answers: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", hook_text("post_gen_project", answers)], cwd=project, check=True)


def contents(project: Path) -> dict[str, bytes]:
    return {path: file.read_bytes() for path, file in files(project).items()}


def test_running_again_changes_nothing(tmp_path: Path, settings: Path) -> None:
    """The update tool runs the hooks again."""
    project = fresh(tmp_path, settings, **NON_DEFAULT)
    before = contents(project)
    run_hook(project, NON_DEFAULT)
    assert contents(project) == before


def test_only_the_inside_of_the_project_is_renamed(tmp_path: Path, settings: Path) -> None:
    """A parent folder, or the project itself, may be called custom."""
    parent = tmp_path / "custom"
    parent.mkdir()
    project = fresh(parent, settings, proj_name="custom", custom_name="spinlab")
    assert project == parent / "custom"
    assert (project / "spinlab").is_dir()


def test_a_users_own_files_are_left_alone(tmp_path: Path, settings: Path) -> None:
    """Rendered over a project in use: runs, other workflows and files of one's own stay as they are."""
    project = fresh(tmp_path, settings, **NON_DEFAULT)
    mine = {
        "experiments/a/config.yaml": "type: custom.models.a.Model\n",
        ".github/workflows/mine.yml": "run: x\n",
        "spinlab/models/mine_model.py": "MINE = 1\n",
        "data/custom.bin": "custom/x\n",
    }
    for path, text in mine.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    again = project / "custom" / "models"
    again.mkdir(parents=True)
    (again / "new_model.py").write_text("from custom.models import x\n")
    run_hook(project, NON_DEFAULT)
    assert {path: (project / path).read_text() for path in mine} == mine
    assert (project / "spinlab/models/new_model.py").read_text() == "from spinlab.models import x\n"
    assert not (project / "custom").exists()


def test_rendered_over_a_project_in_use(tmp_path: Path, settings: Path) -> None:
    """`cookiecutter -f`: texts of one's own that name the package keep it, and so do lines that hold answers."""
    answers = {**NON_DEFAULT, "proj_name": "custom", "author_name": "custom", "description": "Our 'custom' trainer"}
    project = fresh(tmp_path, settings, **answers)
    mine = {
        "notes/a.py": "import custom.models\n",
        "data/photos/list.txt": "custom/labels.txt\n",
        "notes/thesis": "custom/x",
    }
    for path, text in mine.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    words = [f"{key}={value}" for key, value in answers.items()]
    command = [sys.executable, "-m", "cookiecutter", "-f", "--no-input", "--config-file", str(settings)]
    subprocess.run([*command, "-o", str(tmp_path), str(REPO), *words], check=True, capture_output=True)
    assert {path: (project / path).read_text() for path in mine} == mine
    assert "Our 'custom' trainer" in (project / "README.md").read_text()
    table = tomllib.loads((project / "pyproject.toml").read_text())
    assert table["project"]["name"] == "custom"
    assert table["project"]["authors"] == [{"name": "custom"}]
    assert "spinlab.*" in table["tool"]["setuptools"]["packages"]["find"]["include"]


def test_runs_in_the_templates_folder_stay_there(tmp_path: Path, settings: Path) -> None:
    """Where somebody trained in the template itself, a project gets neither the runs nor the data."""
    template = tmp_path / "template"
    shutil.copytree(REPO, template, ignore=shutil.ignore_patterns(".git", ".venv", "*_cache", "__pycache__"))
    inside = template / TEMPLATE.name
    left = {
        "experiments/default/train.log": "{{ 7*7 }} {% raw %}",
        "experiments/default/config.yaml": "a: 1",
        "data/a.csv": "1",
        "data/photos/labels.csv": "{{ 7*7 }},{% cat\r\n",
    }
    for path, text in left.items():
        (inside / path).parent.mkdir(parents=True, exist_ok=True)
        (inside / path).write_text(text)
    arguments = {"no_input": True, "output_dir": str(tmp_path), "config_file": str(settings)}
    project = Path(cookiecutter(str(template), **arguments))
    assert sorted(path.name for path in (project / "data").iterdir()) == ["README.md", "digits.npz"]
    assert not (project / "experiments").exists()


def test_examples_of_ones_own_are_left_alone(tmp_path: Path, settings: Path) -> None:
    """Rendered without the examples over a project that has some of its own, one of them beside a shipped one."""
    project = fresh(tmp_path, settings, **NON_DEFAULT)
    mine = {
        "examples/mine/task.py": "MINE = 1\n",
        "examples/gan/notes.md": "mine\n",
        "tests/examples/test_mine.py": "\n",
    }
    for path, text in mine.items():
        (project / path).parent.mkdir(exist_ok=True)
        (project / path).write_text(text)
    shutil.copy(TEMPLATE / "leaves.yaml", project)  # as a render over it does
    run_hook(project, {**NON_DEFAULT, "examples": "none"})
    left = {path: text.decode() for path, text in contents(project).items() if "examples/" in path}
    assert left == mine


def test_leftovers_of_tools_are_dropped(post_gen: ModuleType, tmp_path: Path) -> None:
    """The template is tested in place, so caches may lie in it when it is rendered."""
    for name in ("__pycache__", "common/__pycache__", ".ruff_cache/x", ".git/.mypy_cache"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "common/a.py").write_text("")
    post_gen.drop_caches(tmp_path)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == {"common", "common/a.py", ".git", ".git/.mypy_cache"}
