"""Parts: what a project can do without is whole files, and everything else works as before without them."""

import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from support import RECORD, REPO, TABLE, TEMPLATE, Render, files, mypy

OPTIONAL = [name for name in TABLE if name != "examples"]
# What the answers `parts` and `examples` can ask for: nothing, one leaf, everything, and some in between.
DRAW = random.Random(16)
SUBSETS = [sorted(DRAW.sample(OPTIONAL, DRAW.randint(2, len(OPTIONAL) - 2))) for _ in range(10)]
COMBINATIONS = {
    "core": {"parts": "core"},
    "usual": {"parts": "usual"},
    **{name: {"parts": name} for name in OPTIONAL},
    "examples": {"parts": "core", "examples": "all"},
    "all": {"parts": "all", "examples": "all"},
    **{f"subset {number}": {"parts": " ".join(names)} for number, names in enumerate(SUBSETS)},
}
# Each is a whole training. These are tried before each submission, the others before a release (`make test-full`).
TRIED_OFTEN = ("core", "usual", "all")
# The one list of what a project may have, in its README.
LIST = re.compile(r"^## Parts\n.*?^```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
UNCUT: dict[str, str] = {}  # the weights of the default run, by the first combination that a process trains
OWN_PYTHON = sys.executable  # as the tests are imported: a program that `warm_runs` forks outlives a kill
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def test_the_table_names_what_there_is() -> None:
    """Every pattern finds files, no file belongs to two leaves, and a leaf is built on leaves only."""
    owners: dict[str, str] = {}
    for name, leaf in TABLE.items():
        assert leaf["about"], name
        assert set(leaf) <= {"about", "usual", "files", "needs"}, name
        assert set(leaf.get("needs", ())) <= TABLE.keys(), name
        for pattern in leaf["files"]:
            found = [path.relative_to(TEMPLATE).as_posix() for path in TEMPLATE.glob(pattern) if path.is_file()]
            assert found, f"{name}: {pattern}"
            for path in found:
                assert owners.setdefault(path, name) == name, path


def test_the_readme_lists_every_part() -> None:
    """In every project, with or without it."""
    found = LIST.search((TEMPLATE / "README.md").read_text(encoding="utf-8"))
    assert found
    assert sorted(line.split()[0] for line in found[1].splitlines()) == sorted(TABLE)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("core", "usual", "all") else pytest.mark.slow) for name in COMBINATIONS],
)
def test_nothing_left_speaks_of_what_is_gone(render: Render, name: str) -> None:
    """No file imports or names a file that is not there; no page links to one. What was cut leaves the format right."""
    project = render(**COMBINATIONS[name])
    check(project, "-m", "ruff", "format", "--no-cache", "--check", ".")
    check(project, "-m", "ruff", "check", "--no-cache", ".")
    there = files(project)
    gone = [path for path in files(render(examples="all")) if path not in there]
    modules = {
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in gone if path[-3:] == ".py"
    }
    tools = {each for each in modules if each.startswith("tools.")}
    problems = []
    for path, file in there.items():
        if not path.endswith((".md", ".sh", ".toml", ".yaml", ".yml", "Makefile", ".py", ".json")):
            continue
        text = file.read_text(encoding="utf-8")
        if path == "README.md":
            text = LIST.sub("", text)
        if path.endswith(".py"):
            problems += [f"{path} imports {each}" for each in imported(text) & modules]
        names = [each for each in gone if each in text and re.search(rf"(?<![\w/.]){re.escape(each)}\b", text)]
        names += {each for each in re.findall(r"\btools\.\w+", text) if each in tools}
        problems += [f"{path} names {each}" for each in names if not each.endswith("__init__.py")]
        if path.endswith(".md"):
            links = re.findall(r"\]\(([\w/.]+)(?:#[^)]*)?\)", text)
            problems += [f"{path} links to {each}" for each in links if not (file.parent / each).exists()]
    assert not problems, "\n".join(problems)


@cache
def imported(text: str) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("name", ["stages", "slurm"])
def test_to_delete_the_files_is_all(render: Render, name: str) -> None:
    """It leaves what the answer without the part gives, byte for byte, but for the record of the answer."""
    rest = " ".join(other for other in OPTIONAL if other not in (name, "sweep"))
    with_it, without = (files(render(parts=parts)) for parts in (f"{rest} {name}", rest))
    paths = (path for pattern in TABLE[name]["files"] for path in TEMPLATE.glob(pattern))
    gone = {path.relative_to(TEMPLATE).as_posix() for path in paths}
    assert with_it.keys() - gone == without.keys()
    for path in without.keys() - {RECORD}:
        assert with_it[path].read_bytes() == without[path].read_bytes(), path


def test_what_the_answer_refuses(tmp_path: Path, settings: Path) -> None:
    """An unknown name in `parts` ends the rendering with the names that there are, and leaves no folder."""
    words = [sys.executable, "-m", "cookiecutter", "--no-input", "--config-file", str(settings), "-o", str(tmp_path)]
    done = subprocess.run([*words, str(REPO), "parts=slrum"], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "there is no slrum" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("stages", ["--stages", "[{until: 1epoch}, {optim: {lr: 0.01}}]"]),
        ("transforms", ["--dataset.train.transforms", "[{type: torch.square}]"]),
        pytest.param(
            "streams", ["--dataset.train", "{$REPLACE: true, type: one_by_one.Lines}"], marks=pytest.mark.slow
        ),
        pytest.param("fsdp", ["--dist.strategy", "fsdp", "--dist.processes", "2"], marks=pytest.mark.slow),
    ],
)
def test_what_is_absent_says_how_to_get_it(render: Render, tmp_path: Path, part: str, options: list[str]) -> None:
    """A config that asks for a part that was left out ends before training, with the part's name and the command."""
    project = Path(shutil.copytree(render(**COMBINATIONS["core"]), tmp_path / "project"))
    (project / "one_by_one.py").write_text(
        "class Lines:\n    def __init__(self, data_dir, mode): ...\n    def __iter__(self): yield 1\n"
    )
    words = [sys.executable, "train.py", "--config", "configs/default.yaml", *options]
    done = subprocess.run(words, cwd=project, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode, said
    assert f"make add PART={part}" in said, said


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TRIED_OFTEN else pytest.mark.full) for name in COMBINATIONS]
)
def test_each_combination_works(render: Render, tmp_path: Path, name: str) -> None:
    """Style, types, own tests; trained, killed, resumed to the same weights, evaluated on 1 and 2 processes."""
    project = tmp_path / "project"
    shutil.copytree(render(**COMBINATIONS[name]), project)
    check(project, "-m", "ruff", "check", "--no-cache", ".")
    check(project, "-m", "ruff", "format", "--no-cache", "--check", ".")
    check(project, "-m", *mypy(tmp_path.parent))
    check(project, "train.py", "--list")
    if name in TABLE:  # its tests need nothing that other parts bring
        own = [path for pattern in TABLE[name]["files"] for path in project.glob(pattern)]
        tests = sorted(str(path) for path in own if path.name.startswith("test_"))
        if tests:
            check(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, timeout=1500)
    options = ["--config", "configs/default.yaml", "--progress.epoch", "3"]
    if "weights" not in UNCUT:  # the same for all of them: what a project leaves out does not change a bit
        check(project, "train.py", *options, "--name", "whole")
        UNCUT["weights"] = weights(project, "whole")
    killed = subprocess.Popen(
        [OWN_PYTHON, "train.py", *options, "--name", "killed"],
        cwd=project,
        env=ENVIRONMENT,
        stderr=subprocess.DEVNULL,
    )
    latest = project / "experiments" / "killed" / "checkpoints" / "latest.pt"
    deadline = time.monotonic() + 120
    while not latest.exists() and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    check(project, "train.py", *options, "--name", "killed", "--resume", "auto")
    assert weights(project, "killed") == UNCUT["weights"]
    values = []
    for processes in ("1", "2"):
        words = ("--model_pt", "experiments/killed", "--dist.processes", processes)
        assert "Accuracy" in check(project, "evaluate.py", *words)
        record = project / "experiments" / "killed" / "eval" / "best" / "metrics.json"
        values.append(json.loads(record.read_text())["values"])
    assert values[0] == values[1]


@pytest.mark.slow
def test_the_everyday_tests_of_the_core(render: Render, tmp_path: Path) -> None:
    """As the owner of the smallest project runs them: they need no part. Those of edited ones: test_ownership."""
    project = tmp_path / "project"
    shutil.copytree(render(**COMBINATIONS["core"]), project)
    check(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", timeout=1500)


def check(project: Path, *words: str, timeout: float = 300) -> str:
    """Run a program of the project, which must succeed. Returns what it printed."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=project,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout + done.stderr


def weights(project: Path, name: str) -> str:
    """Return a digest of the weights of a run's last checkpoint."""
    code = (
        "import sys, torch, hashlib; state = torch.load(sys.argv[1], weights_only=True)['model'];"
        "print(hashlib.sha256(b''.join(state[key].numpy().tobytes() for key in sorted(state))).hexdigest())"
    )
    return check(project, "-c", code, f"experiments/{name}/checkpoints/latest.pt").strip()
