"""python -m tools.checkpoint, of what a run records."""

import pytest

from tests.conftest import Runs, load
from tools import checkpoint as tool


def test_checksums_of_samples_are_not_printed(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each entry of up to 64 samples would hide the rest."""
    folder = runs.train()
    read = load(folder)["fingerprint"]["data"]["train"]["samples"]
    assert tool.main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "packages:" in text and "data:" not in text
    assert all(sums["image"] not in text for sums in read.values())
