"""The gradients in the log of a run with debug.debug_mode."""

from tests.conftest import Runs


def test_a_log_line_comes_with_the_largest_gradient(runs: Runs) -> None:
    """And with a line for each parameter, on request."""
    words = ["--debug.debug_mode", "true", "--progress.epoch", "1", "--progress.log_every", "1"]
    log = (runs.train(*words, "--debug.print_all_grad", "true") / "train.log").read_text()
    assert log.count("largest |gradient|") == log.count("weights and gradients:") == 5
    assert "head.2.bias: mean weight" in log
    assert "largest |gradient|" not in (runs.train(name="off") / "train.log").read_text()
