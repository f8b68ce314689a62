"""docs/tools/sweep.md: the search with the real Optuna."""

import json
from pathlib import Path

import pytest

from real import REPORT
from support import fresh
from test_data_tools import BLOCK, call, python  # noqa: F401 - a Python with the packages of recipes.txt

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_the_search_of_the_page(tmp_path: Path, settings: Path, python: Path) -> None:  # noqa: F811 - the fixture
    """Started again, it continues; the best trial is that of the run with the best validation."""
    root = fresh(tmp_path, settings)
    page = (root / "docs" / "tools" / "sweep.md").read_text()
    (text,) = [text for kind, text in BLOCK.findall(page) if kind == "python"]
    assert "n_trials=30" in text
    assert '"train.py", ' in text
    text = text.replace("n_trials=30", "n_trials=2").replace('"--name"', '"--progress.epoch", "2", "--name"')
    (root / "search.py").write_text(text)
    call(root, python, "search.py")
    said = call(root, python, "search.py")
    losses = []
    for name in ("search_000", "search_001", "search_002", "search_003"):
        rows = map(json.loads, (root / "experiments" / name / "metrics.jsonl").read_text().splitlines())
        losses.append(min(row["values"]["loss"] for row in rows if row["event"] == "val"))
    assert f"number={losses.index(min(losses))}," in said
    assert str(min(losses)) in said
    REPORT.append("docs/tools/sweep.md: the search with Optuna")
