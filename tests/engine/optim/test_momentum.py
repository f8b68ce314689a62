"""The momentum as a schedule, and the rate scaled with the batch."""

from pathlib import Path

import pytest

from tests.conftest import ErrorOf, Runs, load, metrics
from tests.ranks import several


def test_the_rate_grows_with_the_batch(runs: Runs) -> None:
    """Micro-batches and processes count; the log says so."""
    words = ["--optim.scale_lr_by", "16", "--optim.lr", "0.001", "--progress.max_steps", "1", "--optim.accumulate", "2"]
    folder = runs.train(*words, "--batch_size", "32")
    assert metrics(folder, "train")[-1]["values"]["lr"] == 0.004
    assert "optim.lr 0.001 x 64 samples per step / 16 = 0.004" in (folder / "train.log").read_text()
    several(runs, 2, runs.words(*words, "--batch_size", "24", name="two"))
    assert metrics(runs.root / "two", "train")[-1]["values"]["lr"] == 0.006


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--optim.optim_type", "SGD"], "optim_type SGD has no momentum; set args.momentum"),
        (["--optim.momentum_scheduler.type", "plateau"], "is not a function of the step"),
        (["--optim.momentum_scheduler.warmup", "99epoch"], "in optim.momentum_scheduler"),
    ],
)
def test_a_momentum_that_cannot_follow(error_of: ErrorOf, words: list[str], said: str) -> None:
    assert said in error_of("--optim.momentum_scheduler", "{type: linear}", *words)


def test_a_momentum_in_a_run(runs: Runs) -> None:
    """It is that of the step, in the checkpoint too."""
    scheduler = "{type: constant, warmup: 3step, warmup_factor: 0.5}"
    for steps in (1, 4):
        folder = runs.train(
            *("--optim.momentum_scheduler", scheduler, "--optim.optim_type", "SGD", "--optim.args", "{momentum: 0.8}"),
            *("--progress.max_steps", str(steps)),
            name=f"run{steps}",
        )
        wanted = 0.8 * (0.625 if steps == 1 else 1)
        assert load(Path(folder))["optimizer"]["param_groups"][0]["momentum"] == pytest.approx(wanted)
