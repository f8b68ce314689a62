"""The second door: copier makes the same project of the same folder as cookiecutter does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import REPO, copy_of_template, files

HOSTILE = {
    "description": "say \"hi\" \\ to: #1 'custom' 漢字",
    "author_name": 'Zoë "D\'Arc" \\',
    "license": "Apache-2.0",
    "parts": "slurm, sweep runs",
    "custom_name": "my_custom",
    "proj_name": "spin-lab",
    "ci": "none",
    "examples": "all",
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_template(tmp_path_factory.mktemp("copier") / "template")


def copier(template: Path, project: Path, *words: str, **answers: str) -> subprocess.CompletedProcess[str]:
    """Run the real command, in a home of its own."""
    data = [word for key, answer in answers.items() for word in ("--data", f"{key}={answer}")]
    command = [sys.executable, "-m", "copier", "copy", "--defaults", "--quiet", *words, *data]
    environment = {**os.environ, "HOME": str(template.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*command, str(template), str(project)], env=environment, capture_output=True, text=True, check=False
    )


def test_both_doors_ask_the_same() -> None:
    """Questions in the same order, with the same words, choices and defaults."""
    asked = json.loads((REPO / "cookiecutter.json").read_text(encoding="utf-8"))
    prompts = asked["__prompts__"]
    expected: dict[str, dict[str, Any]] = {}
    for key, default in asked.items():
        if key.startswith("_"):
            continue
        expected[key] = {"type": "str", "help": prompts[key], "default": default}
        if isinstance(default, list):
            choices = {prompts[key][choice]: choice for choice in default}
            expected[key] |= {"help": prompts[key]["__prompt__"], "choices": choices, "default": default[0]}
    config = yaml.safe_load((REPO / "copier.yml").read_text(encoding="utf-8"))
    questions = {key: question for key, question in config.items() if not key.startswith("_")}
    assert questions == expected
    assert list(questions) == list(expected)
    assert [list(questions[key].get("choices", {}).values()) for key in questions] == [
        asked[key] if isinstance(asked[key], list) else [] for key in questions
    ]


@pytest.mark.slow
@pytest.mark.parametrize("answers", [{}, HOSTILE], ids=["default", "other"])
def test_both_doors_lead_to_the_same_project(
    template: Path, settings: Path, tmp_path: Path, answers: dict[str, str]
) -> None:
    """Every file with the same bytes and permissions, the record of the answers too."""
    words = [f"{key}={answer}" for key, answer in answers.items()]
    command = [sys.executable, "-m", "cookiecutter", str(template), "--no-input", "--config-file", str(settings)]
    subprocess.run([*command, "-o", str(tmp_path / "a"), *words], check=True, capture_output=True)
    (folder,) = (tmp_path / "a").iterdir()
    done = copier(template, tmp_path / "b" / folder.name, "--trust", **answers)
    assert done.returncode == 0, done.stderr
    one, other = files(folder), files(tmp_path / "b" / folder.name)
    assert one.keys() == other.keys()
    assert len(one) > 150
    assert [name for name in one if one[name].read_bytes() != other[name].read_bytes()] == []
    assert [name for name in one if one[name].stat().st_mode != other[name].stat().st_mode] == []
    empty = [path for path in (tmp_path / "b").rglob("*") if path.is_dir() and not any(path.iterdir())]
    assert empty == []


@pytest.mark.parametrize(
    ("words", "answers", "reason"),
    [
        pytest.param(
            ["--trust"], {"custom_name": "torch"}, "custom_name 'torch' cannot be used: ", marks=pytest.mark.slow
        ),
        pytest.param(
            ["--trust"],
            {"parts": "slurn"},
            "parts: there is no slurn; answer with one or more of: all usual core slurm",
            marks=pytest.mark.slow,
        ),
        (["--trust"], {"license": "GPL"}, "GPL"),
        ([], {}, "--trust"),
    ],
    ids=["package", "part", "choice", "trust"],
)
def test_what_copier_refuses(
    template: Path, tmp_path: Path, words: list[str], answers: dict[str, str], reason: str
) -> None:
    """The same answers as with cookiecutter, for the same reason; nothing is left of the folder."""
    done = copier(template, tmp_path / "project", *words, **answers)
    assert done.returncode != 0
    assert reason in done.stderr
    assert not (tmp_path / "project").exists()
