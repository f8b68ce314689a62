"""Combinations of answers, given to the real command in each way there is, and what becomes of them.

Every day: four rows, one for each way to answer; the files are as they should be. `make test-full`: so are those of
every combination of licence, CI, examples and parts; and each of ROWS, in which any two answers meet, is
linted, checked for types, trained, killed, resumed, evaluated, trained by two processes, and runs its everyday tests.
"""

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from support import RECORD, RENDERED, REPO, TABLE, TEMPLATE, TIMES, Render, files, mypy
from test_leaves import ENVIRONMENT, OPTIONAL, check, weights

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOORS = ["arguments", "replay", "defaults", "prompts"]
LICENCES = ["MIT", "Apache-2.0", "BSD-3-Clause", "none"]
PARTS = ["all", "core", "usual", "slurm, check,stages"]
TEXTS = ("proj_name", "custom_name", "description", "author_name")
NAMES = [
    ("my_project", "custom", "A PyTorch project", ""),
    ("spin-lab", "spinlab", 'say "hi" \\ to: #1', "Zoë O'Neil"),
    ("X" * 64, "x" * 24, "<!-- 漢字 ``` ]]> '''", 'back\\slash "'),
    ("custom", "alpha", "Our 'custom' trainer", "A: B # <d@e.org>"),
]
SWITCHES = {"ci": ["github", "none"], "examples": ["none", "all"]}
# Which of DOORS, LICENCES, PARTS, NAMES, and which answer to ci and examples.
ROWS = """
0000 00  0112 11  0223 11  0331 11
1011 01  1103 11  1232 10  1320 11
2022 11  2130 00  2201 00  2313 00
3033 11  3121 00  3210 10  3302 01
""".strip()
ROWS_BY_NAME = {
    re.sub(" ", "-", row): [int(digit) for digit in row.replace(" ", "")] for row in re.split("  |\n", ROWS)
}
EVERY_DAY = ("0000-00", "1103-11", "2022-11", "3302-01")
# Defaults of somebody who uses other templates and of somebody who means harm. All answers are given, so none is used.
HOSTILE = {
    "proj_name": "../../outside",
    "custom_name": "torch",
    "description": "{{ cookiecutter.__class__ }}",
    "author_name": "two\nlines",
    "license": "GPL-3.0",
    "ci": "travis",
    "examples": "some",
    "parts": "nonsense",
    "project_slug": "{% raw %}",
    "email": ["not", "a", "text"],
}
TRAINING = ["--batch_size", "16", "--optim.accumulate", "4", "--progress.epoch", "2"]
UNCUT: dict[str, str] = {}  # the weights of that training: those of every project


def answers_of(name: str) -> tuple[str, dict[str, str]]:
    """Return how a row is answered, and what."""
    door, licence, parts, names, *switches = ROWS_BY_NAME[name]
    answers = {**dict(zip(TEXTS, NAMES[names], strict=True)), "license": LICENCES[licence], "parts": PARTS[parts]}
    chosen = zip(SWITCHES.items(), switches, strict=True)
    return DOORS[door], {**answers, **{question: values[number] for (question, values), number in chosen}}


def test_any_two_answers_meet() -> None:
    """In some row; and every question and choice of the template occurs."""
    sizes = [len(DOORS), len(LICENCES), len(PARTS), len(NAMES), *map(len, SWITCHES.values())]
    for first, second in itertools.combinations(range(len(sizes)), 2):
        met = {(row[first], row[second]) for row in ROWS_BY_NAME.values()}
        assert met == set(itertools.product(range(sizes[first]), range(sizes[second]))), (first, second)
    assert {DOORS.index(answers_of(name)[0]) for name in EVERY_DAY} == set(range(len(DOORS)))
    asked = json.loads((REPO / "cookiecutter.json").read_text(encoding="utf-8"))
    questions = {name: value for name, value in asked.items() if not name.startswith("_")}
    assert answers_of("0000-00")[1].keys() == questions.keys()
    assert {name: value for name, value in questions.items() if isinstance(value, list)} == {
        "license": LICENCES,
        **SWITCHES,
    }


def command(output: Path, home: Path, *words: str, typed: str | None = None) -> Path:
    """Run cookiecutter as a user with this home would. Returns the only folder that it made."""
    kept = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("COOKIECUTTER")}
    output.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "cookiecutter", str(REPO), "-o", str(output), *words],
        env={**kept, "HOME": str(home)},
        input=typed or "",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (project,) = output.iterdir()
    return project


def answered(door: str, answers: dict[str, str], folder: Path) -> Path:
    """Render a project in one of the ways to give answers, all by the real command."""
    home = folder / "home"
    home.mkdir()
    words = [f"{name}={value}" for name, value in answers.items()]
    defaults = answers if door == "defaults" else HOSTILE
    if door != "prompts":
        text = yaml.safe_dump({"default_context": {"project_slug": "theirs", **defaults}}, allow_unicode=True)
        (home / ".cookiecutterrc").write_text(text, encoding="utf-8")
    if door == "defaults":
        return command(folder / "out", home, "--no-input")
    if door == "arguments":
        return command(folder / "out", home, "--no-input", *words)
    if door == "replay":
        first = command(folder / "first", home, "--no-input", *words)
        again = command(folder / "out", home, "--replay")
        assert contents(again) == contents(first)
        (record,) = (home / ".cookiecutter_replay").iterdir()
        assert contents(command(folder / "file", home, "--replay-file", str(record))) == contents(first)
        return again
    asked = json.loads((REPO / "cookiecutter.json").read_text(encoding="utf-8"))
    lines = []
    for name, default in asked.items():
        if not name.startswith("_"):
            lines.append(str(default.index(answers[name]) + 1) if isinstance(default, list) else answers[name])
    return command(folder / "out", home, typed="\n".join(lines) + "\n")


def contents(project: Path) -> dict[str, bytes]:
    return {path: file.read_bytes() for path, file in files(project).items()}


def expected(answers: dict[str, str]) -> set[str]:
    """Return the paths of the template's files that these answers ask for, under the name of their package."""
    parts = re.split(r"[\s,]+", answers["parts"])
    usual = {name for name in OPTIONAL if TABLE[name].get("usual")}
    wanted = {"all": set(OPTIONAL), "core": set[str](), "usual": usual}.get(answers["parts"], set(parts))
    wanted |= {"examples"} if answers["examples"] == "all" else set()
    while more := {need for name in wanted for need in TABLE[name].get("needs", ())} - wanted:
        wanted |= more
    gone = {
        file for name in TABLE.keys() - wanted for pattern in TABLE[name]["files"] for file in TEMPLATE.glob(pattern)
    }
    paths = files(TEMPLATE).keys() - {file.relative_to(TEMPLATE).as_posix() for file in gone}
    paths -= {"LICENSE"} if answers["license"] == "none" else set()
    paths -= {".github/workflows/ci.yml", ".github/dependabot.yml"} if answers["ci"] == "none" else set()
    paths |= {RECORD}
    paths -= {"leaves.yaml"}
    return {re.sub(r"^custom/", f"{answers['custom_name']}/", path) for path in paths}


def check_files(project: Path, answers: dict[str, str]) -> None:
    """Exactly the files that were asked for; each text is complete and can be read; what need not change has not."""
    assert project.name == answers["proj_name"]
    there = files(project)
    assert there.keys() == expected(answers)
    for path, file in there.items():
        content = file.read_bytes()
        if path.endswith(".npz"):
            continue
        text = content.decode("utf-8")
        assert "\r" not in text, path
        assert not text or text.endswith("\n"), path
        assert not re.search(r"\{\{ ?cookiecutter|cookiecutter\.(?!json)", text), path
        if path.endswith((".yaml", ".yml")):
            list(yaml.safe_load_all(text))
        elif path.endswith((".json", ".ipynb")):
            json.loads(text)
        elif path.endswith(".toml"):
            tomllib.loads(text)
        elif path.endswith(".py"):
            compile(text, path, "exec")
        unchanged = path not in RENDERED | {RECORD}
        if unchanged and answers["custom_name"] == "custom":
            assert content == (TEMPLATE / path).read_bytes(), path
            assert file.stat().st_mode & 0o777 == (TEMPLATE / path).stat().st_mode & 0o777, path
    meta = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert meta["description"] == answers["description"]
    assert meta["authors"] == [{"name": answers["author_name"] or f"The {answers['proj_name']} authors"}]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERY_DAY else (pytest.mark.slow, pytest.mark.full))
        for name in ROWS_BY_NAME
    ],
)
def test_each_way_to_answer(render: Render, tmp_path: Path, name: str) -> None:
    """The files are those that were asked for, and the same bytes as by a call of cookiecutter."""
    door, answers = answers_of(name)
    project = answered(door, answers, tmp_path)
    check_files(project, answers)
    assert contents(project) == contents(render(**answers))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("examples", SWITCHES["examples"])
def test_the_files_of_every_combination(tmp_path: Path, parts: str, examples: str) -> None:
    """All licences, with CI and without, by the command line of somebody with defaults that mean harm."""
    _, plain = answers_of("0000-00")
    for licence, ci in itertools.product(LICENCES, SWITCHES["ci"]):
        answers = {**plain, "license": licence, "ci": ci, "parts": parts, "examples": examples}
        folder = tmp_path / f"{licence}-{ci}"
        folder.mkdir()
        check_files(answered("arguments", answers, folder), answers)
        shutil.rmtree(folder)


@contextmanager
def timed(name: str, step: str) -> Iterator[None]:
    """Note how long a step of a row takes, for the table at the end."""
    start = time.monotonic()
    yield
    TIMES.append((name, step, time.monotonic() - start))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", ROWS_BY_NAME)
def test_each_row_is_executed(tmp_path: Path, name: str) -> None:
    """Whatever was answered, a training has the same bits: uncut, killed and resumed, and by two processes."""
    door, answers = answers_of(name)
    with timed(name, "render"):
        project = answered(door, answers, tmp_path)
    with timed(name, "style"):
        check(project, "-m", "ruff", "check", "--no-cache", ".")
        check(project, "-m", "ruff", "format", "--no-cache", "--check", ".")
    with timed(name, "types"):
        check(project, "-m", *mypy(tmp_path.parent))
    train = ["train.py", "--config", "configs/default.yaml"]
    with timed(name, "two steps"):
        check(project, *train, "--name", "short", "--progress.max_steps", "2")
    if not UNCUT:
        check(project, *train, *TRAINING, "--name", "whole")
        UNCUT["weights"] = weights(project, "whole")
    with timed(name, "kill"):
        kill(project, [*train, *TRAINING, "--name", "killed"])
    with timed(name, "resume"):
        check(project, *train, *TRAINING, "--name", "killed", "--resume", "auto")
    assert weights(project, "killed") == UNCUT["weights"]
    with timed(name, "evaluate"):
        assert "Accuracy" in check(project, "evaluate.py", "--model_pt", "experiments/killed")
    with timed(name, "two ranks"):
        check(project, *train, *TRAINING, "--name", "ranks", "--dist.processes", "2")
    with timed(name, "everyday tests"):
        check(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", timeout=2400)


def kill(project: Path, words: list[str]) -> None:
    """Start a training, and kill it after its first checkpoint, before its end."""
    process = subprocess.Popen([sys.executable, *words], cwd=project, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    latest = project / "experiments" / "killed" / "checkpoints" / "latest.pt"
    deadline = time.monotonic() + 240
    while not latest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert latest.exists()
