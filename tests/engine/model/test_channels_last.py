"""Weights and images with the channels last in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.trainer import Trainer
from tests.conftest import Runs, load, same
from tests.ranks import several

WORDS = ["--precision.mode", "fp64", "--prepare.channels_last"]
CHECKED = ["--plugins", f"[{__name__}:check_order]"]


def check_order(trainer: Trainer) -> None:
    """A plugin: every convolution computes on channels-last weights and images, in each step and evaluation."""

    def check(module: nn.Conv2d, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        for tensor in (module.weight, inputs[0], output):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
            assert tensor.shape[1] == 1 or tensor.shape[2:] == (1, 1) or not tensor.is_contiguous()

    convolutions = [module for module in trainer.task.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 3
    for module in convolutions:
        module.register_forward_hook(check)


def near(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.slow
def test_it_changes_the_order_and_nothing_else(runs: Runs) -> None:
    """Strides in training and evaluation; the weights of the usual order, to rounding in 64 bits; resume."""
    first = runs.train(*WORDS, "false", name="first")
    last = runs.train(*WORDS, "true", *CHECKED, name="last")
    near(load(first)["model"], load(last)["model"])
    cut = runs.train(*WORDS, "true", *CHECKED, "--progress.max_steps", "3", name="cut")
    runs.train(*WORDS, "true", *CHECKED, "--resume", str(cut), name="cut")
    for part in ("model", "optimizer"):
        assert same(load(last)[part], load(cut)[part]), part
    assert "this resume is bit-exact" in log(cut)


@pytest.mark.slow
def test_a_resume_may_change_the_order(runs: Runs) -> None:
    """It is carried out otherwise, and trains the same; it is not called bit-exact."""
    uncut = runs.train(*WORDS, "false", name="uncut")
    cut = runs.train(*WORDS, "false", "--progress.max_steps", "3", name="cut")
    runs.train(*WORDS, "true", "--resume", str(cut), name="cut")
    near(load(uncut)["model"], load(cut)["model"])
    assert "sample-exact, not bit-exact (model whole -> whole, channels last" in log(cut)


@pytest.mark.slow
def test_on_two_processes(runs: Runs) -> None:
    """With DDP, the same weights as in the usual order."""
    words = ["--batch_size", "16", *WORDS]
    several(runs, 2, runs.words(*words, "false", name="first"))
    several(runs, 2, runs.words(*words, "true", *CHECKED, name="last"))
    near(load(runs.root / "first")["model"], load(runs.root / "last")["model"])


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()
