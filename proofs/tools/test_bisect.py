"""python -m tools.bisect with real runs, and corners of what it searches in."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.test_bisect import Repository, recorded
from tools.bisect.runs import default_metric, differing_environment, differing_settings, mixed

HARMLESS = [
    "--optim.weight_decay", "0.001", "--model.dropout", "0.11", "--optim.no_decay", "auto", "--optim.clip_gradients",
    "50", "--optim.clip_type", "value", "--optim.lr_scheduler.patience", "11", "--optim.lr_scheduler.threshold",
    "0.001", "--optim.ema.warmup", "false", "--prepare.channels_last", "true", "--progress.max_steps", "1000",
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
    assert differing_environment(good, good) == "" and default_metric(good, bad) == "train.loss"


@pytest.mark.slow
def test_a_setting_among_twelve(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    good, bad = repository.train("good"), repository.train("bad", *HARMLESS, "--optim.lr", "0.03")
    done = repository.bisect(good, bad, "--seeds", "2")
    assert "differ    12 settings, 0 commits and uncommitted changes" in done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("optim.lr 0.001 -> 0.03 makes the difference: val.loss is ")
    assert int(second.partition(" ")[0]) <= 6


@pytest.mark.slow
def test_harmless_settings_are_within_the_noise(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    good, other = repository.train("good"), repository.train("other", *HARMLESS)
    done = repository.bisect(good, other, "--seeds", "3", code=1)
    assert done.stdout.startswith("the difference is within the noise over seeds: GOOD has ")


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
