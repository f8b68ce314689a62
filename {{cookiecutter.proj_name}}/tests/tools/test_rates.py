"""python -m tools.rates and tools.diff: what a config plans, and in what two of them differ."""

import re
from pathlib import Path

import pytest

from common.base.errors import UserError
from tests.conftest import CONFIG, Runs, metrics
from tools import diff, rates

SCHEDULE = ["--optim.lr_scheduler", "{type: cosine, warmup: 3step}", "--progress.log_every", "1"]
STAGED = ["--stages", "[{until: 1, optim: {lr: 0.01}}, {lr_scheduler: {type: linear}}]", "--optim.scale_lr_by", "16"]


@pytest.mark.parametrize("more", [[], STAGED, ["--optim.groups", "[{match: '*.bias', lr_mult: 2, name: a}]"]], ids=str)
def test_the_plan_is_what_the_run_does(runs: Runs, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = runs.train(*SCHEDULE, *more)
    rows = [row["values"] for row in metrics(folder, "train")]
    done = [row.get("lr", row.get("lr_rest")) for row in rows]
    capsys.readouterr()
    assert rates.main(runs.words(*SCHEDULE, *more)) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == ["step", "epoch", "lr"]
    assert [line[:3] for line in shown[1:11]] == [
        [str(at), str(at // 5 + 1), f"{rate:.3g}"] for at, rate in enumerate(done)
    ]


def test_the_momentum_is_planned_too(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--optim.momentum_scheduler", "{type: linear}", "--dist.processes", "2", "--batch_size", "16"]
    assert rates.main(runs.words(*words)) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:4] == ["1", "1", "0.001", "0.81"]


def test_the_keys_that_differ(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of files, of runs, of checkpoints; with the line of each value."""
    folder = runs.train("--progress.max_steps", "1")
    own = tmp_path / "own.yaml"
    own.write_text(f"$BASE: {CONFIG}\noptim: {{lr: 0.5}}\nmodel: {{type: tests.parts.Plain}}\n")
    assert diff.main([str(CONFIG), str(own)]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^optim.lr\n  0.001  # tests/base.yaml:\d+\n  0.5  # {own}:2$", shown, re.MULTILINE)
    assert re.search(r"^model.width\n  32  # tests/base.yaml:\d+\n  null  # default$", shown, re.MULTILINE)
    assert diff.main([str(folder), str(folder / "checkpoints" / "latest.pt")]) == 0
    assert capsys.readouterr().out == "no key differs\n"
    assert diff.main([str(CONFIG), str(folder)]) == 0
    changed = rf"^progress.max_steps\n  null  # tests/base.yaml:\d+\n  1  # {folder}/config.yaml:\d+$"
    assert re.search(changed, capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(UserError, match="is neither a config file nor the folder of a run"):
        diff.main([str(CONFIG), str(tmp_path)])
