"""The schedule `plateau` counts validations, and a checkpoint holds the count."""

from tests.conftest import Runs
from tests.resume import same_after_cut


def test_a_resume_is_exact(runs: Runs) -> None:
    same_after_cut(runs, "plain", "--optim.lr_scheduler", "{type: plateau, args: {patience: 1, threshold: 0.9}}")
