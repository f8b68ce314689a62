"""tools.check with settings that other parts bring."""

import pytest

from tests.conftest import Runs
from tests.tools.test_check import lab
from tools.check.__main__ import main
from tools.check.checks import CHECKS, Check
from tools.check.lab import Lab, NotApplicable


def test_a_reduction_that_is_exact_is_not_split_in_three() -> None:
    """It would end with an error of the config, which says nothing about the owner's code."""
    with pytest.raises(NotApplicable, match="reduction fixed"):
        lab("--dist.reduction", "fixed").split("accumulate", 4, accumulate=3)


def test_each_only_counts(monkeypatch: pytest.MonkeyPatch, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if it is given twice; without it, all do."""
    monkeypatch.setattr(Check, "result", lambda check, lab: ("holds", []))
    monkeypatch.setattr(Lab, "train", lambda lab, name: None)
    for only, names in (("--only seed --only resume", 2), ("--only seed resume", 2), ("", len(CHECKS))):
        capsys.readouterr()
        assert main([*runs.words(), *only.split()]) == 0
        assert capsys.readouterr().out.count("holds") == names
