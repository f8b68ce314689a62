"""What the tests know about the template, and how they render it."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cookiecutter.main import cookiecutter

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
TEMPLATE = REPO / "{{cookiecutter.proj_name}}"
RENDERED = {"README.md", "LICENSE", "CITATION.cff", "pyproject.toml"}
RECORD = ".copier-answers.yml"  # where a project comes from, written when it is rendered
CACHES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"}
TABLE = yaml.safe_load((TEMPLATE / "leaves.yaml").read_text(encoding="utf-8"))
NON_DEFAULT = {
    "proj_name": "spin-lab",
    "custom_name": "spinlab",
    "license": "none",
    "ci": "none",
    "examples": "all",
    "parts": " ".join(name for name in TABLE if name not in ("ops", "kernels_on_cpu", "examples")),
}

Render = Callable[..., Path]
TIMES: list[tuple[str, str, float]] = []  # row of answers, step, seconds: a table at the end of the test report


def fresh(output: Path, settings: Path, **answers: str) -> Path:
    """Return a project of its own, for a test that changes it or expects a refusal; with all parts if it names none."""
    arguments = {"no_input": True, "output_dir": str(output), "config_file": str(settings)}
    return Path(cookiecutter(str(REPO), extra_context={"parts": "all", **answers}, **arguments))


def mypy(folder: Path) -> list[str]:
    """Return a mypy command whose cache, in `folder`, starts as a copy of the one that `make lint` filled.

    mypy compares contents, so a rendered project takes a second instead of twenty.
    """
    cache = folder / "mypy"
    known = REPO / ".mypy_cache" / "project"
    if known.is_dir() and not cache.exists():
        shutil.copytree(known, cache)
    return ["mypy", "--no-error-summary", "--cache-dir", str(cache)]


def copy_of_template(target: Path) -> Path:
    """Copy what a project is rendered from, without what else lies in this repository; no git."""
    ignored = shutil.ignore_patterns(*CACHES)
    for name in (TEMPLATE.name, "hooks"):
        shutil.copytree(REPO / name, target / name, ignore=ignored)
    for name in ("cookiecutter.json", "copier.yml"):
        shutil.copy(REPO / name, target)
    return target


def release_order(name: str) -> tuple[list[int], str]:
    """Sort what is kept of earlier versions: commits first, by name, then releases in their order."""
    numbers = re.match(r"v(\d+)\.(\d+)\.(\d+)(?:\.tar\.xz)?$", name)
    return [int(number) for number in numbers.groups()] if numbers else [], name


def files(folder: Path) -> dict[str, Path]:
    """Return every file below `folder` by its path in POSIX form, without what tools leave behind."""
    found: dict[str, Path] = {}
    for parent, names, inside in os.walk(folder):
        names[:] = [name for name in names if name not in CACHES]
        paths = (Path(parent, name) for name in inside)
        found.update((path.relative_to(folder).as_posix(), path) for path in paths)
    return found


def hook_text(name: str, answers: dict[str, str]) -> str:
    """Return a hook as cookiecutter would run it with these answers."""
    text = (REPO / "hooks" / f"{name}.py").read_text(encoding="utf-8")
    assert text.count("{{ cookiecutter | tojson }}") == 1
    text = text.replace("{{ (_cookiecutter | default({})) | tojson }}", "{}")
    return text.replace("{{ cookiecutter | tojson }}", json.dumps(answers))


def python_with(wanted: Path, factory: pytest.TempPathFactory) -> Path:
    """Return a Python that has the packages in the file `wanted`, and all that this one has; made once per list."""
    name = wanted.stem
    folder = REPO / ".venv" / name if (REPO / ".venv").is_dir() else factory.mktemp(name)
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "done.txt"
        if not done.is_file() or done.read_text() != wanted.read_text():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], check=True)
            own = next((folder / "venv" / "lib").glob("python*/site-packages"))
            (own / "main.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
            pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "-q", "-r", str(wanted)]
            subprocess.run(pip, check=True, timeout=900)
            done.write_text(wanted.read_text())
    return folder / "venv" / "bin" / "python"
