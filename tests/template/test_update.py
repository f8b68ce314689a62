"""A rendered project takes over a newer version of the template, and keeps what its owner changed.

Through each door of docs/updating.md, with the commands of that page, from kept states of the template:
`tools/earlier_run.py` keeps another one.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from support import HERE, RECORD, REPO, TEMPLATE, Render, copy_of_template, files, fresh, release_order

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="the update tools work on git repositories")

EARLIER = sorted((HERE / "earlier_templates").glob("*.tar.xz"), key=lambda path: release_order(path.name))
# Before each submission from the last one, before a release from all.
FROM = [pytest.param(path, marks=() if path == EARLIER[-1] else pytest.mark.full) for path in EARLIER]
ANSWERS = {"proj_name": "spin-lab", "custom_name": "spinlab", "ci": "none", "parts": "all"}
# What an owner does: an own file, and edits of a sample, of the default config and of the engine.
OWN = {"spinlab/models/mine_model.py": "MINE = 1\n", "configs/mine.yaml": "$BASE: default.yaml\nname: old_key\n"}
EDITS = {
    "spinlab/__init__.py": ("\\Z", "# mine\n"),
    "configs/default.yaml": ("^  lr: 0.001 ", "  lr: 0.02 "),
    "common/evaluator.py": ("^class Evaluator", "# mine\nclass Evaluator"),
}
MIGRATION = """_migrations:
  - version: v0.2.0
    command: sed s/old_key/new_key/ configs/mine.yaml > mine.new && mv mine.new configs/mine.yaml
  - version: v0.1.0
    command: exit 1"""
TRAIN = "--name old --gpu_ids -1 --model.width 4 --optim.accumulate 2 --progress.log_every 5"

Call = Callable[..., str]


@pytest.fixture
def call(tmp_path: Path, settings: Path) -> Call:
    """call(folder, "git", "status", ...) -> its output. No settings of the user who runs this are read or written."""
    git = tmp_path / "gitconfig"
    git.write_text("[user]\nname = A\nemail = a@example.org\n[init]\ndefaultBranch = main\n")
    programs = tmp_path / "bin"  # the commands of the page, with the Python of these tests
    programs.mkdir()
    for name in ("python", "copier", "cruft", "cookiecutter", "ruff"):
        module = "" if name == "python" else f"-m {name} "
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "COOKIECUTTER_CONFIG": str(settings),
        "GIT_CONFIG_GLOBAL": str(git),
        "GIT_CONFIG_NOSYSTEM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run(folder: Path, *command: str, code: int = 0) -> str:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    return run


def commit(call: Call, folder: Path, message: str) -> None:
    call(folder, "git", "add", "--all")
    call(folder, "git", "commit", "--quiet", "--message", message)


def history(call: Call, folder: Path, earlier: Path, door: str) -> None:
    """Make a repository of the template with two versions: a kept one and today's."""
    folder.mkdir()
    call(folder, "git", "init", "--quiet")
    with tarfile.open(earlier) as archive:
        archive.extractall(folder, filter="data")
    if door == "copier" and not (folder / "copier.yml").exists():  # then it could not be entered: with today's door
        shutil.copy(REPO / "copier.yml", folder)
        shutil.rmtree(folder / "hooks")
        shutil.copytree(REPO / "hooks", folder / "hooks")
    commit(call, folder, "earlier")
    call(folder, "git", "tag", "v0.1.0")
    call(folder, "git", "rm", "-rq", ".")
    copy_of_template(folder)
    edit(folder / "copier.yml", r"^_migrations: \[\]$", MIGRATION)
    commit(call, folder, "today")
    call(folder, "git", "tag", "v0.2.0")


def make(call: Call, source: Path, door: str) -> Path:
    """Make a project of version 0.1.0 and commit it. What copier makes is the same, says test_copier.py."""
    folder = source.parent
    if door == "cruft":
        command = ["cruft", "create", str(source), "--checkout", "v0.1.0", "--no-input", "--extra-context"]
        call(folder, *command, json.dumps(ANSWERS))
    else:
        words = [f"{key}={answer}" for key, answer in ANSWERS.items()]
        call(folder, "cookiecutter", "--no-input", "--checkout", "v0.1.0", f"file://{source}", *words)
    project = folder / "spin-lab"
    call(project, "git", "init", "--quiet")
    commit(call, project, "as it was made")
    return project


def edit(path: Path, pattern: str, new: str) -> None:
    text, number = re.subn(pattern, new, path.read_text(), count=1, flags=re.MULTILINE)
    assert number == 1, f"{path}: {pattern}"
    path.write_text(text)


def commands(title: str, source: Path, page: str = "updating.md") -> list[str]:
    """Return the blocks of a section of a page, for this project, and without what pip would install."""
    page = (TEMPLATE / "docs" / page).read_text(encoding="utf-8")
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    own = " ".join(f"{key}={answer}" for key, answer in ANSWERS.items())
    written = "proj_name=my_project custom_name=spinlab"
    blocks = [re.sub("^pip .*\n", "", block, flags=re.MULTILINE) for block in blocks]
    return [
        block.replace(written, own).replace("my_project", "spin-lab").replace("ADDRESS", f"file://{source}")
        for block in blocks
    ]


def update(call: Call, project: Path, source: Path, door: str) -> None:
    """Run the commands of the page; questions that they would ask a person get no answer."""
    title = {"copier": "With copier", "cruft": "With cruft", "hand": "By hand"}[door]
    quiet = {"copier update --trust": " --defaults", "cruft update": " --skip-apply-ask"}
    for block in commands(title, source):
        for command, option in quiet.items():
            block = re.sub(f"^{command}$", command + option, block, flags=re.MULTILINE)
        call(project, "sh", "-euc", block)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["cruft", "copier", "hand"])
@pytest.mark.parametrize("earlier", FROM, ids=lambda path: path.name.partition(".")[0])
def test_an_update_gives_the_new_version_with_the_owners_edits(
    tmp_path: Path, settings: Path, call: Call, earlier: Path, door: str
) -> None:
    """All files are today's, byte by byte, but for what the owner did; and a run of before goes on.

    copier also runs what the new version asks of the owner's own file, and nothing of the version that was there.
    """
    source = tmp_path / "template.git"
    history(call, source, earlier, door)
    project = make(call, source, door)
    for path, text in OWN.items():
        (project / path).write_text(text)
    for path, (pattern, new) in EDITS.items():
        edit(project / path, pattern, new)
    commit(call, project, "mine")
    if door == "cruft":
        call(project, "python", "train.py", "--config", "configs/default.yaml", "--progress.epoch", "2", *TRAIN.split())

    update(call, project, source, door)

    expected = fresh(tmp_path / "expected", settings, **ANSWERS)
    for path, text in OWN.items():
        (expected / path).write_text(text)
    for path, (pattern, new) in EDITS.items():
        edit(expected / path, pattern, new)
    if door == "copier":
        edit(expected / "configs" / "mine.yaml", "old_key", "new_key")
    records = {".cruft.json", RECORD}
    ours, theirs = tracked(call, project), files(expected)
    assert ours.keys() - records == theirs.keys() - records
    assert [path for path in ours.keys() - records if ours[path].read_bytes() != theirs[path].read_bytes()] == []
    head = call(source, "git", "rev-parse", "HEAD").strip()
    record = ours[".cruft.json" if door == "cruft" else RECORD].read_text(encoding="utf-8")
    assert json.loads(record)["commit"] == head if door == "cruft" else yaml.safe_load(record)["_commit"] == head
    assert len(records & ours.keys()) == 1
    call(project, "make", "lint", "PYTHON=true")
    call(project, "ruff", "check", "--quiet", ".")
    call(project, "ruff", "format", "--quiet", "--check", ".")
    if door == "cruft":
        commit(call, project, "updated")
        goes_on(call, project)
    else:
        call(project, "python", "-c", "import train, evaluate, predict, spinlab.tasks.classification_task")


def tracked(call: Call, project: Path) -> dict[str, Path]:
    """Return the project's files that git does not ignore, by path."""
    listed = call(project, "git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return {path: project / path for path in listed if (project / path).is_file()}


def goes_on(call: Call, project: Path) -> None:
    """The run of before the update ends with the same bits as without it, says the page's comparison.

    If this is red after a change of the engine that is meant to change numbers, CHANGELOG.md must say so, and states
    from before the change are compared no more.
    """
    (block,) = commands("Before and after an update", project, "tools/same.md")
    block = block.replace("experiments/default", "experiments/old").replace("epoch 45", "epoch 3")
    said = call(project, "sh", "-euc", block)
    assert "this resume is not guaranteed to be bit-exact or sample-exact: the code changed" in said
    assert re.search(r"^same: \d+ rows up to step 30, \d+ tensors ", said, flags=re.MULTILINE), said


@pytest.mark.slow
def test_what_could_not_be_merged_is_not_silent(tmp_path: Path, call: Call) -> None:
    """cruft says "as clean as possible" of an update that is not clean; `make lint` names the files."""
    source = tmp_path / "template.git"
    history(call, source, EARLIER[-1], "cruft")
    project = make(call, source, "cruft")
    edit(source / TEMPLATE.name / "common/evaluator.py", "^class Evaluator", "# theirs\nclass Evaluator")
    commit(call, source, "theirs")
    edit(project / "common/evaluator.py", "^class Evaluator", "# mine\nclass Evaluator")
    commit(call, project, "mine")
    update(call, project, source, "cruft")
    said = call(project, "make", "lint", "PYTHON=true", code=2)
    assert "common/evaluator.py" in said
    assert "not merged: see docs/updating.md" in said


def test_leftovers_of_an_update_are_named(tmp_path: Path, render: Render, call: Call) -> None:
    """Marks in any file, also in a page, and rejected changes; not those in a virtual environment or in runs."""
    project = Path(shutil.copytree(render(), tmp_path / "project"))
    call(project, "git", "init", "--quiet")
    for path in (".venv/lib/a.rej", "experiments/a/train.log"):
        (project / path).parent.mkdir(parents=True)
        (project / path).write_text("<<<<<<< ours\n")
    commit(call, project, "mine")
    call(project, "make", "lint", "PYTHON=true")
    edit(project / "docs" / "resume.md", "^## Files$", "<<<<<<< ours\n## Files\n=======\n>>>>>>> theirs")
    (project / "common" / "step.py.rej").write_text("@@\n")
    said = call(project, "make", "lint", "PYTHON=true", code=2)
    assert "docs/resume.md\n" in said
    assert "./common/step.py.rej\n" in said
    assert "a.rej" not in said
    assert "train.log" not in said


@pytest.mark.slow
def test_the_package_gets_another_name(call: Call, render: Render, tmp_path: Path, settings: Path) -> None:
    """The files are those of a project that was made with that name, and an earlier run can be resumed."""
    project = fresh(tmp_path, settings)
    call(project, "git", "init", "--quiet")
    commit(call, project, "as it was made")
    train = ["python", "train.py", "--config", "configs/default.yaml", "--name", "old", "--gpu_ids", "-1"]
    call(project, *train, "--progress.max_steps", "2")
    for block in commands("Another name for your package", REPO):
        call(project, "sh", "-euc", block)
    there = {path: file.read_bytes() for path, file in files(render(custom_name="spinlab")).items()}
    assert there == {path: file.read_bytes() for path, file in files(project).items() if path in there}
    assert not (project / "custom").exists()
    call(project, *train, "--progress.max_steps", "4", "--resume", "auto")
    assert "Accuracy" in call(project, "python", "evaluate.py", "--model_pt", "experiments/old")
