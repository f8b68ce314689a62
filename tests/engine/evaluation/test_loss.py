"""Losses with weights of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import Runs, load, metrics
from tests.ranks import several
from tests.resume import same_after_cut

LEARNED = ["--loss", "{$REPLACE: true, tests.small.Learned: {}}"]
PLAIN = ["--model", "{type: tests.small.Plain}"]
WEIGHT = "loss.tests_small_Learned.layer.weight"


@pytest.mark.slow
def test_weights_of_a_loss_are_trained_and_resumed(runs: Runs) -> None:
    """In the optimizer and the checkpoint, with its buffers."""
    uncut, _ = same_after_cut(runs, "warm-up", *LEARNED)
    end, best = load(uncut), load(uncut, "best")
    assert not torch.equal(end["task"][WEIGHT], best["task"][WEIGHT])
    assert WEIGHT in best["task"] and WEIGHT in end["optimizer"]["param_groups"][0]["param_names"]
    assert end["task"]["loss.tests_small_Learned.calls"] == 10


def test_it_is_evaluated_with_its_weights(runs: Runs, evaluated: Callable[..., dict[str, Any]]) -> None:
    folder = runs.train(*LEARNED, "--optim.lr", "0.01")
    measured = evaluated(folder / "checkpoints" / "latest.pt", "--split", "val")
    assert measured["values"]["loss"] == metrics(folder, "val")[-1]["values"]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [[], ["--dist.static_graph", "true"], ["--dist.find_unused_parameters", "true"], ["--dist.strategy", "fsdp"]],
    ids=str,
)
def test_two_processes_train_it_as_one(runs: Runs, more: list[str]) -> None:
    """In 64 bits, so that only a mistake shows; its gradients are exchanged, and accumulated."""
    common = [*LEARNED, *PLAIN, "--precision.mode", "fp64", "--optim.accumulate", "2"]
    alone = runs.train(*common, "--batch_size", "32", name="alone")
    several(runs, 2, runs.words(*common, *more, "--batch_size", "16", name="two"))
    first, second = load(alone), load(runs.root / "two")
    assert WEIGHT in first["task"]
    for key, value in {**first["model"], **first["task"]}.items():
        torch.testing.assert_close({**second["model"], **second["task"]}[key], value, rtol=0, atol=1e-12)
