"""python -m tools.same: what two runs measured and saved, compared to the last bit."""

from pathlib import Path

import pytest

from common.base.errors import UserError
from tests.conftest import Runs
from tests.resume import cut, words
from tools.same import __main__ as tool


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, the same cut inside its second epoch and resumed, one of another seed, and a shorter one."""
    runs = Runs(tmp_path_factory.mktemp("experiments"))
    runs.train(*words("ema"), name="uncut")
    cut(runs, "ema", 8)
    runs.train(*words("ema", "--resume", "auto"), name="cut")
    runs.train(*words("ema", "--dist.random_seed", "7"), name="seed")
    runs.train(*words("ema", "--progress.epoch", "1"), name="short")
    return runs.root


def test_a_resumed_run_is_the_same(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of docs/resume.md: what differs between any two runs (speeds, starts) is left out."""
    assert tool.main([str(experiments / "uncut"), str(experiments / "cut")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("same: 15 rows up to step 10, ") and out.endswith("of the checkpoints of step 10\n")


def test_another_seed_is_not(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first row that differs, and by how much; then the entries of the checkpoints."""
    assert tool.main([str(experiments / "uncut"), str(experiments / "seed")]) == 1
    out = capsys.readouterr().out
    assert "15 of 15 rows differ, first the train row of step 1:\n  " in out
    assert "(difference " in out and "  model." in out and "numbers\n  and " in out


def test_runs_of_other_lengths(experiments: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compared is what both have: the rows to the end of the shorter one, and a checkpoint of one step."""
    assert tool.main([str(experiments / "short"), str(experiments / "uncut")]) == 0
    out = capsys.readouterr().out
    assert "up to step 5 (where A ends; the other goes to 10), no checkpoints, since the runs have none of" in out


def test_nothing_to_compare(experiments: Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*metrics.jsonl; name two folders of runs"):
        tool.main([str(experiments), str(experiments / "uncut")])
