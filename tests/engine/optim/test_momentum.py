"""The momentum as a schedule."""

from pathlib import Path

import pytest

from tests.conftest import ErrorOf, Runs, load


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
