"""`make add`: a part comes later, by every way to make a project; what the owner did stays."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import RECORD, REPO, TABLE, copy_of_template, files, mypy

SWEEP = {"docs/tools/sweep.md", "tests/tools/test_sweep.py", "tools/sweep/__main__.py"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the template; cookiecutter wants to see "git" in an address."""
    folder = copy_of_template(tmp_path_factory.mktemp("add") / "template.git")
    commit(folder, "first")
    return folder


def call(folder: Path, *words: str, code: int = 0) -> str:
    """Run a program with no settings of the user; Python for everything that is a module."""
    command = list(words) if words[0] in ("git", "make") else [sys.executable, "-m", *words]
    environment = {**os.environ, "HOME": str(folder.parent), "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def add(project: Path, part: str = "", code: int = 0) -> str:
    return call(project, "make", "add", f"PART={part}", f"PYTHON={sys.executable}", code=code)


def commit(folder: Path, message: str) -> None:
    call(folder, "git", "init", "--quiet")
    call(folder, "git", "add", "--all")
    call(folder, "git", "-c", "user.name=A", "-c", "user.email=a@b", "commit", "--quiet", "-m", message)


def contents(project: Path) -> dict[str, bytes]:
    return {path: file.read_bytes() for path, file in files(project).items() if not path.startswith(".git/")}


def made(template: Path, folder: Path, door: str) -> Path:
    """Make a small project, whose package has a name of its own, and commit it."""
    answers = {"proj_name": "spin-lab", "custom_name": "spinlab", "parts": "core"}
    words = [f"{key}={answer}" for key, answer in answers.items()]
    if door == "cruft":
        call(folder, "cruft", "create", str(template), "--no-input", "--extra-context", json.dumps(answers))
    elif door == "copier":
        data = [each for word in words for each in ("--data", word)]
        call(folder, "copier", "copy", "--trust", "--defaults", "--quiet", *data, str(template), "spin-lab")
    else:
        address = f"file://{template}" if door == "address" else os.path.relpath(template, folder)
        call(folder, "cookiecutter", "--no-input", address, *words)
    commit(folder / "spin-lab", "made")
    return folder / "spin-lab"


@pytest.mark.slow
@pytest.mark.parametrize("door", ["address", "path", "copier", "cruft"])
def test_a_part_comes_with_its_tests_and_page(template: Path, tmp_path: Path, door: str) -> None:
    """And with what it needs; the owner's edits, deletions and files stay; the record of the answers knows it."""
    project = made(template, tmp_path, door)
    (project / "README.md").write_text("Mine.\n")
    (project / "docs" / "evaluation.md").unlink()
    commit(project, "mine")
    before = files(project).keys()
    assert "sweep        grids" in add(project)
    add(project, "sweep")
    added = files(project).keys() - before
    assert SWEEP | {"tools/runs/__main__.py"} <= added
    assert all(re.search("sweep|run|slurm", path) for path in added)
    assert (project / "README.md").read_text() == "Mine.\n"
    assert not (project / "docs" / "evaluation.md").exists()
    assert "core sweep" in (project / (".cruft.json" if door == "cruft" else RECORD)).read_text()
    commit(project, "swept")
    add(project, "ops")
    assert (project / "spinlab" / "ops" / "scale_exp.py").is_file()
    assert "custom" not in (project / "configs" / "ops.yaml").read_text()
    call(project, "ruff", "check", "--no-cache", "-q", ".")
    call(project, "ruff", "format", "--no-cache", "--check", "-q", ".")


@pytest.mark.slow
def test_a_part_deleted_by_hand_comes_back(template: Path, tmp_path: Path) -> None:
    project = made(template, tmp_path, "path")
    add(project, "sweep")
    commit(project, "added")
    whole = files(project).keys()
    shutil.rmtree(project / "tools" / "sweep")
    for name in ("tests/tools/test_sweep.py", "docs/tools/sweep.md"):
        (project / name).unlink()
    commit(project, "deleted")
    add(project, "sweep")
    assert {path for path in files(project) if ".git/" not in path} == {path for path in whole if ".git/" not in path}
    assert "parts: core sweep\n" in (project / RECORD).read_text()


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("part", TABLE)
def test_each_part_goes_and_comes_back(template: Path, tmp_path: Path, part: str) -> None:
    """Of a project with all of them: deleted with what is built on it, then added: every file is as it was."""
    words = ("parts=all", "examples=all")
    call(tmp_path, "cookiecutter", "--no-input", os.path.relpath(template, tmp_path), *words)
    project = tmp_path / "my_project"
    commit(project, "made")
    before = contents(project)
    going = [part]
    for name in going:
        going += [each for each in TABLE if name in TABLE[each].get("needs", ()) and each not in going]
    for name in going:
        for path in [path for pattern in TABLE[name]["files"] for path in project.glob(pattern)]:
            path.unlink()
    commit(project, "deleted")
    call(project, "ruff", "check", "--no-cache", "-q", ".")
    call(project, "ruff", "format", "--no-cache", "--check", "-q", ".")
    call(project, *mypy(tmp_path.parent))
    call(project, "train", "--config", "configs/default.yaml", "--progress.epoch", "null", "--progress.max_steps", "3")
    shutil.rmtree(project / "experiments")
    add(project, " ".join(going))
    assert contents(project) == before


@pytest.mark.parametrize(
    ("asked", "names", "recorded"),
    [
        ("core", ["sweep"], "core sweep"),
        ("usual", ["slurm", "sweep"], "usual sweep"),
        ("all", ["slurm"], "all"),
        ("core, sweep", ["sweep", "examples"], "core sweep"),
    ],
)
def test_what_is_recorded(tmp_path: Path, asked: str, names: list[str], recorded: str) -> None:
    """What the answer does not have already."""
    (tmp_path / RECORD).write_text(f"examples: none\nparts: {asked}\n")
    hook = runpy.run_path(str(REPO / "hooks" / "add.py"))
    hook["record"](tmp_path, {"parts": asked}, TABLE, names)
    examples = "all" if "examples" in names else "none"
    assert (tmp_path / RECORD).read_text() == f"examples: {examples}\nparts: {recorded}\n"


@pytest.mark.slow
def test_what_is_refused(template: Path, tmp_path: Path) -> None:
    """Each refusal says what to do, and changes nothing."""
    elsewhere = Path(shutil.copytree(template, tmp_path / "other.git"))
    project = made(elsewhere, tmp_path, "address")
    unknown = add(project, "swep", code=2)
    assert "there is no part called swep. These can be added:\n  slurm" in unknown
    assert "there is no part called sweep" not in unknown
    (project / "notes.txt").write_text("mine")
    assert "there are uncommitted changes, so an addition could not be undone; commit first" in add(
        project, "runs", code=2
    )
    (project / "notes.txt").unlink()
    add(project, "runs")
    commit(project, "runs")
    assert "runs is here already: a table of all runs" in add(project, "runs", code=2)
    history = (project / ".git").rename(tmp_path / "history")
    assert "this folder is not in git" in add(project, "sweep", code=2)
    history.rename(project / ".git")
    elsewhere.rename(tmp_path / "gone")
    gone = add(project, "sweep", code=2)
    assert f"the template cannot be reached at file://{elsewhere}:" in gone
    assert "write its address into .copier-answers.yml" in gone
    assert not call(project, "git", "status", "--porcelain")
