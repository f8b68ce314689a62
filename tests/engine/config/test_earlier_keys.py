"""Keys that had another name are read under it for ever: in files, as options and as targets of references."""

from pathlib import Path

import pytest

from common.base.errors import UserError
from common.config import resolve
from tests.conftest import CONFIG
from custom.config import Config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"$BASE: '{CONFIG}'\nworker: 3\nprogress: {{iter_loss: 7}}\ndir: {{expr_dir: elsewhere}}\n"
        "model: {width: '${worker}'}\n"
    )
    return path


def test_in_a_file_and_as_an_option(file: Path) -> None:
    found = resolve(Config, [file]).config
    assert (found.num_workers, found.progress.log_every, found.dir.runs_dir) == (3, 7, "elsewhere")
    assert found.model["width"] == 3
    words = ["--worker", "2", "--progress.iter_loss=5", "--dir.expr_dir", "there", "--name", "x${progress.iter_loss}"]
    found = resolve(Config, [file], words).config
    assert (found.num_workers, found.progress.log_every, found.dir.runs_dir) == (2, 5, "there")
    assert (found.model["width"], found.name) == (2, "x5")


def test_given_twice(tmp_path: Path) -> None:
    """Under both names: nothing is chosen silently."""
    path = tmp_path / "both.yaml"
    path.write_text(f"$BASE: '{CONFIG}'\nworker: 3\nnum_workers: 2\n")
    with pytest.raises(UserError, match="worker is the earlier name of num_workers"):
        resolve(Config, [path])
    with pytest.raises(UserError, match="given twice, by two names"):
        resolve(Config, [CONFIG], ["--num_workers", "1", "--worker", "2"])


def test_problems_have_the_name_of_today(file: Path) -> None:
    with pytest.raises(UserError) as error:
        resolve(Config, [file], ["--worker", "-1"])
    assert "num_workers = -1" in str(error.value)
