"""Optimizers that compute the loss several times in a step."""

import pytest

from tests.conftest import ErrorOf, Runs, load, metrics
from tests.resume import same_after_cut

LBFGS = ("--model", "{type: tests.small.Plain}", "--optim.optim_type", "LBFGS", "--optim.lr", "0.1")
SEARCH = ("--optim.args", "{line_search_fn: strong_wolfe, max_iter: 4}")


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_lbfgs_trains_and_resumes_exactly(runs: Runs, mode: str) -> None:
    folder, _ = same_after_cut(runs, "accumulate", *LBFGS, *SEARCH, "--precision.mode", mode, at=40)
    losses = [row["values"]["loss"] for row in metrics(folder, "val")]
    assert losses[-1] < losses[0]


def test_the_closure_returns_the_loss_of_the_whole_step(runs: Runs) -> None:
    """So a line search takes the same steps with micro-batches."""
    words = (*LBFGS, *SEARCH, "--precision.mode", "fp64", "--progress.epoch", "1")
    whole = load(runs.train(*words, "--batch_size", "36", name="whole"))["model"]
    parts = load(runs.train(*words, "--batch_size", "12", "--optim.accumulate", "3", name="parts"))["model"]
    assert max(float((whole[name] - parts[name]).abs().max()) for name in whole) < 1e-9


def test_what_does_not_work_is_said(error_of: ErrorOf) -> None:
    """Torch cannot scale the loss of an optimizer that computes it several times."""
    said = error_of(*LBFGS, "--precision.mode", "fp16")
    assert "precision.mode = 'fp16'" in said and "torch cannot scale the loss for LBFGS; use bf16" in said
