"""python -m tools.bisect with real runs, and corners of what it searches in."""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.base.errors import UserError
from tests.tools.test_bisect import STEPS, Repository, recorded, search
from tools.bisect.__main__ import main
from tools.bisect.runs import differing_settings, last_common_step, mixed, value_at

HARMLESS = [
    "--optim.weight_decay", "0.001", "--model.dropout", "0.11", "--optim.no_decay", "auto", "--optim.clip_gradients",
    "50", "--optim.clip_type", "value", "--early_stop.patience", "11", "--best.min_delta",
    "0.001", "--prepare.channels_last", "true", "--progress.max_steps", "1000",
    "--optim.lr_scheduler.min_factor", "0.1",
]  # fmt: skip


def test_settings_that_differ() -> None:
    """Arguments of another type go with it; what decides no training, and the seed, are left out."""
    good = recorded({}, config={"model": {"type": "A", "width": 4}, "optim": {"lr": 1}, "name": "a", "new": 1,
                                "dist": {"random_seed": 1}, "progress": {"max_steps": 8, "log_every": 1}})  # fmt: skip
    bad = recorded({}, config={"model": {"type": "B", "depth": 2}, "optim": {"lr": 2}, "name": "b",
                               "dist": {"random_seed": 7}, "progress": {"max_steps": 9, "log_every": 3}})  # fmt: skip
    settings = differing_settings(good, bad)
    assert {name: [change.key for change in keys] for name, keys in settings.items()} == {
        "model": ["model.type", "model.width", "model.depth"], "optim.lr": ["optim.lr"], "new": ["new"],
        "progress.max_steps": ["progress.max_steps"],
    }  # fmt: skip
    keys = [change.key for name in ("model", "new", "progress.max_steps") for change in settings[name]]
    assert mixed(good.config, bad.config, keys) == {
        "model": {"type": "B", "depth": 2}, "optim": {"lr": 1}, "name": "a", "dist": {"random_seed": 1},
        "progress": {"max_steps": 9, "log_every": 1},
    }  # fmt: skip


def test_a_loss_that_is_not_finite_is_bad_where_that_of_bad_is() -> None:
    text = search(lambda count: float("nan") if count > STEPS + 5 else 1.0)[1]
    assert text.startswith("model.k5 0 -> 1 makes the difference: val.loss is nan with it")


@pytest.mark.parametrize(
    ("reason", "is_nan"),
    [
        ("the loss of step 6 is not a finite number (of train samples 1, 2)", True),
        ("the gradient of step 3, of train samples 1, 2, has the norm nan, though the mean loss is finite", True),
        ("weights are not finite numbers after step 5", True),
        ("the gradients of the last 20 steps, to step 25, are not finite in fp16", True),
        ("step 7 is bad, as were 2 before it: its loss is nan", True),
        ("ValueError: no such file", False),
    ],
)
def test_what_ended_as_not_finite(reason: str, is_nan: bool) -> None:
    run = recorded({1: 3.0}).files
    run.reason = reason
    found = value_at(run, "val.loss", 2)
    assert (found is not None and math.isnan(found)) == is_nan


def test_a_short_run_is_as_long_as_both_have_measured() -> None:
    good = recorded({1: 3.0, 2: 2.5, 3: 2.0, 4: 1.5, 5: 1.0})
    assert last_common_step(good, recorded({1: 3.1, 2: 2.4, 3: 2.4}), "val.loss") == 3
    with pytest.raises(UserError, match=r"both runs must have measured train.loss; GOOD has val.loss"):
        last_common_step(good, good, "train.loss")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no run.json; name the folder of a run"):
        main([str(tmp_path), str(tmp_path)])


@pytest.mark.slow
def test_a_setting_among_eleven(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    good, bad = repository.train("good"), repository.train("bad", *HARMLESS, "--optim.lr", "0.03")
    done = repository.bisect(good, bad, "--seeds", "2")
    assert "differ    9 settings, 0 commits and uncommitted changes" in done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("optim.lr 0.001 -> 0.03 makes the difference: val.loss is ")
    assert int(second.partition(" ")[0]) <= 6


@pytest.mark.slow
@pytest.mark.full
def test_harmless_settings_are_within_the_noise(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    good, other = repository.train("good"), repository.train("other", *HARMLESS)
    done = repository.bisect(good, other, "--seeds", "3", code=1)
    assert done.stdout.startswith("no setting and no commit: GOOD has ")


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    good, bad = repository.train("good"), repository.train("bad", "--optim.lr", "0.03")
    command = [sys.executable, "-m", "tools.bisect", good, bad]
    with subprocess.Popen(
        command, cwd=repository.root, env=repository.environment, text=True, stderr=subprocess.PIPE
    ) as process:
        try:
            while not list(repository.temporary.glob("bisect-*/trial/run/run.json")) and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=90)
        finally:
            process.kill()
    assert (process.returncode, "Traceback" in said) == (130, False), said
    assert not list(repository.temporary.glob("bisect-*"))
    assert subprocess.run(["pgrep", "-f", str(repository.temporary)], capture_output=True).returncode == 1
