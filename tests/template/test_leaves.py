"""Leaves: what a project can do without comes off without a trace, and everything else works as before."""

import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from support import RECORD, REPO, TABLE, TEMPLATE, Render, files, fresh

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
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def test_the_table_names_what_there_is() -> None:
    """Every pattern finds files, no file belongs to two leaves, and a leaf is built on leaves only."""
    owners: dict[str, str] = {}
    for name, leaf in TABLE.items():
        assert leaf["about"], name
        assert set(leaf) <= {"about", "usual", "files", "needs", "edits", "lines", "schema"}, name
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


def test_every_edit_fits() -> None:
    """After an edit of a file that a leaf touches: its text is still there, once."""
    for name, leaf in TABLE.items():
        for file, edits in leaf.get("edits", {}).items():
            text = (TEMPLATE / file).read_text(encoding="utf-8")
            for edit in edits:
                old = edit if isinstance(edit, str) else edit[0]
                assert text.count(old) == 1, f"{name}, {file}: {old}"


@pytest.mark.parametrize("kept", [["ops"], ["ops", "sweep", "runs"], []], ids=["ops", "some", "none"])
def test_the_table_keeps_the_other_leaves(render: Render, kept: list[str]) -> None:
    """What is left of it is as it was, whatever the texts of the others hold, so that more can go later."""
    project = render(parts=" ".join(kept) or "core")
    left = yaml.safe_load((project / "leaves.yaml").read_text(encoding="utf-8")) or {}
    assert left == {name: leaf for name, leaf in TABLE.items() if name in kept}


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
        if (
            not path.endswith((".md", ".sh", ".toml", ".yaml", ".yml", "Makefile", ".py", ".json"))
            or path == "leaves.yaml"
        ):
            continue
        text = file.read_text(encoding="utf-8")
        if path == "README.md":
            text = LIST.sub("", text)
        if path.endswith(".py"):
            problems += [f"{path} imports {each}" for each in imported(ast.parse(text)) & modules]
        names = [each for each in gone if re.search(rf"(?<![\w/.]){re.escape(each)}\b", text)]
        names += {each for each in re.findall(r"\btools\.\w+", text) if each in tools}
        problems += [f"{path} names {each}" for each in names if not each.endswith("__init__.py")]
        if path.endswith(".md"):
            links = re.findall(r"\]\(([\w/.]+)(?:#[^)]*)?\)", text)
            problems += [f"{path} links to {each}" for each in links if not (file.parent / each).exists()]
    assert not problems, "\n".join(problems)


def imported(tree: ast.Module) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.fixture
def project(tmp_path: Path, settings: Path) -> Path:
    """A project of its own, in git."""
    folder = fresh(tmp_path, settings)
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm start"):
        subprocess.run(["git", *command.split()], cwd=folder, check=True)
    return folder


def make_prune(project: Path, leaf: str = "") -> subprocess.CompletedProcess[str]:
    words = ["make", "prune", f"PYTHON={sys.executable}", *([f"LEAF={leaf}"] if leaf else [])]
    return subprocess.run(words, cwd=project, capture_output=True, text=True, check=False)


def test_make_prune(project: Path, settings: Path, tmp_path: Path) -> None:
    """It gives what the answer gives, but for the record of it, says what it deletes, and refuses to lose anything."""
    listed = make_prune(project).stdout
    assert all(f"\n{name} " in f"\n{listed}" for name in TABLE if name != "examples")
    (project / "notes.txt").write_text("mine")
    refused = make_prune(project, "slurm")
    assert refused.returncode
    assert "uncommitted changes" in refused.stderr
    (project / "notes.txt").unlink()
    assert "there is no leaf called slrum" in make_prune(project, "slrum").stderr
    assert not subprocess.run(["git", "status", "--porcelain"], cwd=project, capture_output=True, check=True).stdout
    done = make_prune(project, "slurm sweep")
    assert done.returncode == 0
    assert "deleted scripts/slurm.sh" in done.stdout
    rest = " ".join(name for name in OPTIONAL if name not in ("slurm", "sweep"))
    answered = fresh(tmp_path / "answered", settings, parts=rest)
    left, asked = (
        {path: file.read_bytes() for path, file in files(folder).items() if not path.startswith((".git/", RECORD))}
        for folder in (project, answered)
    )
    assert left == asked


def test_an_edited_line_is_not_guessed(project: Path) -> None:
    """If the text that has to go is not as it was, nothing is changed, and the message names file and text."""
    leaf, file, text = ("fsdp", *next(first_edit(TABLE["fsdp"])))
    path = project / file
    path.write_text(path.read_text(encoding="utf-8").replace(text, text.upper()), encoding="utf-8")
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "mine"], cwd=project, check=True
    )
    refused = make_prune(project, leaf)
    assert refused.returncode
    assert file in refused.stderr
    assert text in refused.stderr
    assert not subprocess.run(["git", "status", "--porcelain"], cwd=project, capture_output=True, check=True).stdout


def test_the_table_without_a_leaf(post_gen: ModuleType) -> None:
    """What is left of it is the entries of the others, whatever texts the removed one holds."""
    without = post_gen.load(TEMPLATE / "tools" / "prune.py")._without_entries
    text = (TEMPLATE / "leaves.yaml").read_text(encoding="utf-8")
    for name in TABLE:
        rest = yaml.safe_load(without(text, [name]))
        assert rest == {other: leaf for other, leaf in TABLE.items() if other != name}, name


def first_edit(leaf: dict[str, dict[str, list[str | list[str]]]]) -> Iterator[tuple[str, str]]:
    """Files with code and a text that goes from them with a leaf."""
    for file, edits in leaf.get("edits", {}).items():
        if file.endswith(".py"):
            yield file, edits[0] if isinstance(edits[0], str) else edits[0][0]


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
        ("trackers", ["--monitor.writers", "[mlflow]"]),
        ("trackers", ["--monitor.writers", "[{type: wandb, project: mine}]"]),
        ("streams", ["--dataset.train", "{$REPLACE: true, type: one_by_one.Lines}"]),
        ("fsdp", ["--dist.strategy", "fsdp", "--dist.processes", "2"]),
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
    """Style, types (of the tests too); trained, killed, resumed to the same weights, evaluated."""
    project = tmp_path / "project"
    shutil.copytree(render(**COMBINATIONS[name]), project)
    check(project, "-m", "ruff", "check", "--no-cache", ".")
    check(project, "-m", "ruff", "format", "--no-cache", "--check", ".")
    check(project, "-m", "mypy", "--no-error-summary", "--cache-dir", str(tmp_path.parent / "mypy"))
    check(project, "train.py", "--list")
    options = ["--config", "configs/default.yaml", "--progress.epoch", "3"]
    if "weights" not in UNCUT:  # the same for all of them: what a project leaves out does not change a bit
        check(project, "train.py", *options, "--name", "whole")
        UNCUT["weights"] = weights(project, "whole")
    killed = subprocess.Popen(
        [sys.executable, "train.py", *options, "--name", "killed"],
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
    said = check(project, "evaluate.py", "--model_pt", "experiments/killed")
    assert "Accuracy" in said


@pytest.mark.slow
@pytest.mark.full
def test_the_everyday_tests_of_the_core(render: Render, tmp_path: Path) -> None:
    """As the owner of the smallest project runs them; before each submission those of an edited one: test_ownership."""
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
