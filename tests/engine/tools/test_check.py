"""tools.check with settings that other parts bring."""

import pytest

from tests.tools.test_check import lab
from tools.check.lab import NotApplicable


def test_a_reduction_that_is_exact_is_not_split_in_three() -> None:
    """It would end with an error of the config, which says nothing about the owner's code."""
    with pytest.raises(NotApplicable, match="reduction fixed"):
        lab("--dist.reduction", "fixed").split("accumulate", 4, accumulate=3)
