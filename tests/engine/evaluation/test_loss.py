"""Losses with weights of their own."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def of_rank(output: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the cross entropy, and a value with a name that this process alone has."""
    rank = os.environ["RANK"]
    loss = nn.functional.cross_entropy(output["logits"], batch["label"])
    return {"entropy": loss, f"rank{rank}": loss.detach() * 0 + float(rank)}


@pytest.mark.slow
def test_values_that_some_processes_have(runs: Runs) -> None:
    """Each is averaged over the processes that have it; no other value takes its place."""
    words = ["--loss", f"{{$REPLACE: true, own: {{type: {__name__}.of_rank}}}}", "--progress.epoch", "1"]
    several(runs, 2, runs.words(*words, "--best.metric", "own.entropy", "--dataset.val.eval_batch_size", "32"))
    for event in ("train", "val"):
        for entry in metrics(runs.root / "run", event):
            assert (entry["values"]["own.rank0"], entry["values"]["own.rank1"]) == (0.0, 1.0), event
            assert entry["values"]["own.entropy"] > 1.0
