"""python -m tools.same: two runs, commits or configs, compared to the last bit."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT, SMALL, Runs, copy_of_project, run
from tests.resume import cut, words
from tools.same import __main__ as tool

# Each edit of the tests' model and loss: what it replaces, and what is found.
EDITS = {
    "another activation": ("nn.ReLU(inplace=True)", "nn.GELU()", "output features.0.2: "),
    "another dropout": ("nn.Dropout(dropout)", "nn.Dropout(dropout / 2)", "output head.1: "),
    "another loss": ("return self.function(", "return 1.01 * self.function(", "output loss["),
    "half a gradient": (
        "return self.head(self.features(image))",
        "x = self.features(image)\n        return self.head(0.5 * x + 0.5 * x.detach())",
        "output gradient features.4: ",
    ),
}


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, the same cut inside its second epoch and resumed, and one of another seed."""
    runs = Runs(tmp_path_factory.mktemp("experiments"))
    runs.train(*words("warm-up"), name="uncut")
    cut(runs, "warm-up", 8)
    runs.train(*words("warm-up", "--resume", "auto"), name="cut")
    runs.train(*words("warm-up", "--dist.random_seed", "7"), name="seed")
    return runs.root


def test_a_resumed_run_is_the_same(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of docs/resume.md: what differs between any two runs (speeds, starts) is left out."""
    assert tool.main([str(experiments / "uncut"), str(experiments / "cut")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("same: 15 rows up to step 10, ") and out.endswith("of the checkpoints of step 10\n")


def test_another_seed_is_not(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first measured values that differ, and by how much; then the entries of the checkpoints."""
    assert tool.main([str(experiments / "uncut"), str(experiments / "seed")]) == 1
    out = capsys.readouterr().out
    assert out.startswith("different; compared: 15 rows up to step 10, ") and "  step 1: train loss: " in out
    assert "(difference " in out and "  model." in out and "numbers\n  and " in out


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in a git repository, with data that git ignores."""
    project = copy_of_project(tmp_path_factory.mktemp("repository") / "project")
    (project / "data").unlink()
    (project / "data" / "mine").mkdir(parents=True)
    shutil.copy(project / "tests" / "digits.npz", project / "data" / "mine")
    (project / ".gitignore").write_text("data/\n__pycache__/\n")
    samples = project / "tests" / "samples.py"
    text = samples.read_text()
    reads = 'np.load(Path(__file__).with_name("digits.npz"))'
    assert text.count(reads) == 1
    samples.write_text(text.replace(reads, 'np.load(data_dir / "mine" / "digits.npz")'))
    git(project, "init")
    git(project, "add", ".")
    git(project, "commit", "-m", "first")
    return project


def compared(project: Path, *given: str, without: str = "") -> "subprocess.CompletedProcess[str]":
    """The tool in this project, with small settings except `without`."""
    small = [word for pair in SMALL.items() if pair[0] not in ("--config", without) for word in pair]
    place = {**ENVIRONMENT, "PYTHONPATH": str(project), "TMPDIR": str(project.parent)}
    command = [sys.executable, "-m", "tools.same", *given, "--steps", "2", *small]
    done = run(command, cwd=project, env=place, timeout=600)
    assert not list(project.parent.glob("same-*")), "the temporary folder is left"
    assert not (project / "experiments").exists()
    return done


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_found(repository: Path, edit: str) -> None:
    """An uncommitted edit against HEAD: the first module, or the first gradient, that differs."""
    old, new, place = EDITS[edit]
    samples = repository / "tests" / "samples.py"
    text = samples.read_text()
    assert old in text
    samples.write_text(text.replace(old, new))
    try:
        done = compared(repository, "HEAD", ".", "--config", "tests/base.yaml")
    finally:
        samples.write_text(text)
    assert done.returncode == 1, done.stderr
    assert f"\nfirst in step 1: {place}" in done.stdout, done.stdout


@pytest.mark.slow
def test_an_equal_refactoring_is_the_same(repository: Path) -> None:
    """A commit against the one before it; what was compared is said, and before that, what is done."""
    samples = repository / "tests" / "samples.py"
    text = samples.read_text()
    samples.write_text(text.replace("self.head(self.features(image))", "self.head(features := self.features(image))"))
    git(repository, "commit", "-am", "a name")
    try:
        done = compared(repository, "HEAD~1", "HEAD", "--config", "tests/base.yaml")
    finally:
        git(repository, "reset", "--hard", "HEAD~1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("same: 2 steps, ") and "of the checkpoints of step 2" in done.stdout
    assert "A: HEAD~1 (" in done.stderr and "and once more if they differ\n" in done.stderr
