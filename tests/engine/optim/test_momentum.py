"""The momentum as a function of the step: the plugin of docs/optim.md."""

import re
from typing import Any

import pytest

from common.trainer import Trainer
from tests.conftest import PROJECT, Runs, load, same

PLUGIN = ["--plugins", "[engine.optim.test_momentum:rising]"]


def rising(trainer: Trainer) -> None:
    page = (PROJECT / "docs" / "optim.md").read_text()
    (block,) = re.findall(r"```python\n(# custom/momentum.py\n.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block.replace("300", "4"), names)
    names["attach"](trainer)


@pytest.mark.slow
def test_the_momentum_of_the_page(runs: Runs) -> None:
    """Each step has its own, and a resume gives the same bits as a run without a stop."""
    whole = runs.train(*PLUGIN, "--progress.max_steps", "4", name="whole")
    runs.train(*PLUGIN, "--progress.max_steps", "2", name="cut")
    cut = runs.train(*PLUGIN, "--progress.max_steps", "4", "--resume", "auto", name="cut")
    assert load(whole)["optimizer"]["param_groups"][0]["betas"][0] == pytest.approx(0.85 + 0.1 * 3 / 4)
    assert same(load(whole)["model"], load(cut)["model"])
    plain = runs.train("--progress.max_steps", "4", name="plain")
    assert not same(load(whole)["model"], load(plain)["model"])
