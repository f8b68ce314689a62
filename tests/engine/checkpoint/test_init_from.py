"""Where the first weights come from: a file of the project."""

import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import PROJECT, Runs, copy_of_project, load, run


@pytest.fixture
def source(runs: Runs) -> Path:
    """A checkpoint."""
    folder = runs.train("--progress.max_steps", "1", "--progress.epoch_val", "-1", name="source")
    return folder / "checkpoints" / "latest.pt"


WORDS = ["--optim.lr", "1e-30", "--progress.max_steps", "1", "--progress.epoch_val", "-1"]


def start(runs: Runs, path: str, *words: str, name: str = "tuned") -> Path:
    return runs.train("--init_from.path", path, *WORDS, *words, name=name)


def starts_from(folder: Path, source: Path) -> bool:
    """Return whether a run that changed nothing by its rate of 1e-30 has the weights of `source`."""
    name = "features.0.0.weight"
    return torch.equal(load(folder)["model"][name], load(source.parents[1])["model"][name])


def test_relative_to_the_project(runs: Runs, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for dir.*, in any working directory."""
    monkeypatch.chdir(tmp_path)
    below = Path("../" * 40 + str(source).lstrip("/"))  # relative to any folder
    start(runs, str(below), name="first")
    (tmp_path / "none.pt").write_bytes(source.read_bytes())
    with pytest.raises(ValueError, match=rf"there is no checkpoint {PROJECT}/none.pt"):
        start(runs, "none.pt", name="second")


@pytest.mark.slow
def test_the_project_counts_and_not_the_working_directory(runs: Runs, source: Path, tmp_path: Path) -> None:
    project = copy_of_project(tmp_path / "project")
    (project / "w.pt").write_bytes(source.read_bytes())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "w.pt").write_text("not weights")
    words = runs.words("--init_from.path", "w.pt", *WORDS, name="tuned")
    done = run([sys.executable, str(project / "train.py"), *words], cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert starts_from(runs.root / "tuned", source)
