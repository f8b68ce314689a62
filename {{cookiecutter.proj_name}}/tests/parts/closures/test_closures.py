"""Optimizers that compute the loss several times in a step."""

from tests.conftest import Runs, metrics
from tests.resume import same_after_cut

WORDS = ("--model", "{type: tests.small.Plain}", "--optim.optim_type", "LBFGS", "--optim.weight_decay", "0")


def test_lbfgs_trains_and_resumes_exactly(runs: Runs) -> None:
    """With accumulation too: the closure returns the loss of the whole step."""
    words = ("--optim.lr", "0.1", "--optim.args", "{line_search_fn: strong_wolfe, max_iter: 4}")
    folder, _ = same_after_cut(runs, "accumulate", *WORDS, *words, at=40)
    losses = [row["values"]["loss"] for row in metrics(folder, "val")]
    assert losses[-1] < losses[0]


def test_fp16_is_refused(runs: Runs) -> None:
    """Torch cannot scale the loss of an optimizer that computes it several times."""
    assert runs.fail(*WORDS, "--precision.mode", "fp16") == 2
    assert "torch cannot scale the loss for LBFGS; use bf16" in (runs.root / "run" / "train.log").read_text()
