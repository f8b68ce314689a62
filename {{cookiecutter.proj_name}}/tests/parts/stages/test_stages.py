"""Stages of a run, and weights of losses that change: through the config and train.py, cut and resumed anywhere."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from common.evaluation.loss import Losses
from tests.conftest import Runs, load, metrics, same
from tests.resume import same_after_cut
from tests.samples import Classification

TOWER = ["--model", "{type: tests.small.Tower}"]
EACH_STEP = ["--progress.epoch_save_checkpoint", "1step", "--checkpoint.keep", "0", "--progress.log_every", "1"]
CE = "{$REPLACE: true, ce: {type: tests.small.Mortal}, size: {type: tests.parts.stages.test_stages.size, weight: 0.5}}"
LOSSES = ["--loss", CE]


# A frozen part, another optimizer inside an epoch, a schedule of its own and other weights; 10 steps in 2 epochs.
THREE = """[
    {until: 3step, freeze: ['stem.*', 'layers.*'], loss: {size: {weight: 0}}},
    {until: 1epoch, optim: {lr: 0.01, weight_decay: 0.1, lr_scheduler: {type: cosine, warmup: 1step}}},
    {optim: {optim_type: SGD, args: {momentum: 0.9}}, freeze: [head.*], loss: {size: {weight: 2}}},
]"""
PLATEAU = """[
    {until: plateau, freeze: ['stem.*'], patience: 1, threshold: 0.9},
    {until: 9step, optim: {lr: 0.01}}, {optim: {optim_type: SGD}},
]"""


def size(output: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a second loss."""
    return output["logits"].square().mean()


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()


def model(folder: Path, step: int) -> dict[str, Any]:
    weights: dict[str, Any] = load(folder, f"step_{step:08}")["model"]
    return weights


def moved(folder: Path, first: int, last: int) -> set[str]:
    """Return the parts of the model whose weights differ between two steps."""
    before, after = model(folder, first), model(folder, last)
    return {name.split(".")[0] for name in before if not same(before[name], after[name])}


def test_each_stage_trains_what_it_says(runs: Runs) -> None:
    """Frozen parts stand still, rates and weights are those of the stage, and its start is recorded."""
    folder = runs.train(*TOWER, *LOSSES, "--stages", THREE, *EACH_STEP)
    assert moved(folder, 1, 3) == {"head"}
    assert moved(folder, 3, 5) == {"stem", "layers", "head"}
    assert moved(folder, 5, 10) == {"stem", "layers"}
    entries = metrics(folder, "train")
    rates = [entry["values"]["lr"] for entry in entries]
    assert rates == pytest.approx([1e-3] * 3 + [0.01 * 0.5, 0.01 * 1.0] + [1e-3] * 5)
    for entry, weight in zip(entries, [0] * 3 + [0.5] * 2 + [2] * 5, strict=True):
        values = entry["values"]
        assert values["loss"] == pytest.approx(values["ce"] + weight * values["size"], rel=1e-6)
    groups = load(folder)["optimizer"]["param_groups"]
    assert groups[0]["momentum"] == 0.9 and "head.weight" not in groups[0]["param_names"]
    assert [(entry["step"], entry["stage"]) for entry in metrics(folder, "stage")] == [(4, 2), (6, 3)]
    assert "stage 3 of 3 after step 5: " in log(folder)
    assert "optim.optim_type AdamW -> SGD" in log(folder) and "prepare.freeze [] -> ['head.*']" in log(folder)


@pytest.mark.parametrize("at", [2, 4, 5, 6, 8])
def test_cut_in_a_stage_and_at_its_start(runs: Runs, at: int) -> None:
    """In stage 1, exactly at its end (4), in stage 2, at the start of stage 3 and an epoch (6), in it."""
    given = [*TOWER, *LOSSES, "--stages", THREE, "--optim.lr_scheduler.warmup", "0"]
    _, folder = same_after_cut(runs, "plain", *given, at=at)
    assert [entry["step"] for entry in metrics(folder, "stage")] == [4, 6]


@pytest.mark.parametrize("at", [3, 7, 8, 10])
def test_a_plateau_ends_a_stage(runs: Runs, at: int) -> None:
    """After 2 validations without progress, one every 2 steps, thus at step 6; its counts are saved."""
    given = [*TOWER, "--stages", PLATEAU]
    folder, _ = same_after_cut(runs, "plain", *given, at=at)
    assert [entry["step"] for entry in metrics(folder, "stage")] == [7, 10]


class Rising(Classification):
    """A task of two losses, whose weights depend on the position."""

    def losses(self, output: Any, batch: Any) -> Losses:
        losses = self.loss(output, batch)
        first, second = 2 * math.cos(math.pi * self.at.step / 10), min(1.0, max(0.0, (self.at.step - 2) / 4))
        return {**losses, "loss": first * losses["ce"] + second * losses["size"]}


def test_the_weight_of_a_loss_changes(runs: Runs) -> None:
    """Between two positions; a loss of the weight 0 is computed and logged; also in evaluation."""
    losses = "{$REPLACE: true, ce: {type: tests.small.Mortal}, size: {type: tests.parts.stages.test_stages.size}}"
    folder = runs.train(
        "--task.type",
        "tests.parts.stages.test_stages.Rising",
        "--loss",
        losses,
        *EACH_STEP,
        "--progress.epoch_val",
        "0.2",
    )
    for event in ("train", "val"):
        steps = []
        for entry in metrics(folder, event):
            # A step is taken with the weights of the position before it; an evaluation with those of its own.
            at, values = entry["step"] - (event == "train"), entry["values"]
            steps.append(at)
            first, second = 2 * math.cos(math.pi * at / 10), min(1.0, max(0.0, (at - 2) / 4))
            assert values["loss"] == pytest.approx(first * values["ce"] + second * values["size"], rel=1e-5, abs=1e-6)
        assert steps == [*range(0, 10)] if event == "train" else [*range(1, 11)]


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 6, 14])
def test_two_ranks_cut_and_resumed(runs: Runs, at: int) -> None:
    """Inside stage 1, exactly at its end, in stage 3. A stage begins with two calls more, for DDP."""
    given = [*TOWER, "--loss", CE, "--stages", THREE, "--batch_size", "16"]
    same_after_cut(runs, "plain", *given, at=at, ranks=2)
