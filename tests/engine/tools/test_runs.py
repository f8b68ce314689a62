"""python -m tools.runs, of runs that other keys than usual distinguish."""

import csv
import io
from pathlib import Path

import pytest

from tests.conftest import Runs
from tools.runs import __main__ as tool


def test_a_run_without_metrics_has_one_column_of_what_it_is_ranked_by(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key `metric` of its config has the name of that column."""
    runs.train("--progress.epoch", "1", name="with")
    runs.train("--progress.epoch", "1", "--metric", "{$REPLACE: true}", name="without")
    capsys.readouterr()
    assert tool.main([str(runs.root), "--csv"]) == 0
    head, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert head.count("metric") == 1
    assert [row[head.index("metric")] for row in rows] == ["loss", "loss"]


def test_a_run_behind_a_link_is_one_of_them(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Moved to another disk, for example; a link to another run of the folder adds none."""
    for name in ("here", "there"):
        runs.train("--progress.max_steps", "1", name=name)
    (runs.root / "there").rename(tmp_path / "disk")
    (runs.root / "there").symlink_to(tmp_path / "disk")
    (runs.root / "again").symlink_to("here")
    capsys.readouterr()
    assert tool.main([str(runs.root), "--csv"]) == 0
    _, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert len(rows) == 2 and "there" in [row[0] for row in rows]
