"""python -m tools.runs, of runs that other keys than usual distinguish."""

import csv
import io

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
