"""Stages of a run, and weights of losses that change: through the config and train.py, cut and resumed anywhere."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import ConfigError
from tests.checkpoint.test_resume import BASE, cut, differing, final
from tests.checkpoint.test_resume import words as resumable
from tests.conftest import Runs, load, metrics, same
from tests.ranks import refused, several

TOWER = ["--model", "{type: tests.parts.Tower}"]
PLAIN = ["--model", "{type: tests.parts.Plain}"]
EACH_STEP = ["--progress.epoch_save_checkpoint", "1step", "--checkpoint.keep", "0", "--progress.iter_loss", "1"]
CE = "{$REPLACE: true, ce: {type: tests.parts.Mortal}, size: {type: tests.test_stages.size, weight: 0.5}}"
LOSSES = ["--loss", CE]

# A frozen part, another optimizer inside an epoch, a schedule of its own and other weights; 10 steps in 2 epochs.
THREE = """[
    {until: 3step, freeze: ['stem.*', 'layers.*'], loss: {size: {weight: 0}}},
    {until: 1epoch, optim: {lr: 0.01, weight_decay: 0.1}, lr_scheduler: {type: cosine, warmup: 1step}},
    {optim: {optim_type: SGD, args: {momentum: 0.9}}, freeze: [head.*], loss: {size: {weight: 2}}},
]"""
PLATEAU = """[
    {until: plateau, freeze: ['stem.*'], lr_scheduler: {patience: 1, threshold: 0.9}},
    {until: 9step, optim: {lr: 0.01}}, {optim: {optim_type: SGD}},
]"""
DATA = "[{until: 1epoch}, {dataset: {train: {scale: 0.9}}, optim: {lr: 0.01}}]"


def size(output: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A second loss."""
    return output["logits"].square().mean()


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()


def model(folder: Path, step: int) -> dict[str, Any]:
    weights: dict[str, Any] = load(folder, f"step_{step:08}")["model"]
    return weights


def moved(folder: Path, first: int, last: int) -> set[str]:
    """The parts of the model whose weights differ between two steps."""
    before, after = model(folder, first), model(folder, last)
    return {name.split(".")[0] for name in before if not same(before[name], after[name])}


def test_each_stage_trains_what_it_says(runs: Runs) -> None:
    """R-51, QQ-32: frozen parts stand still, rates and weights are those of the stage, and its start is recorded."""
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
    assert [(entry["step"], entry["stage"], entry["of"]) for entry in metrics(folder, "stage")] == [(4, 2, 3), (6, 3, 3)]
    assert "stage 3 of 3 after step 5: " in log(folder)
    assert "optim.optim_type AdamW -> SGD" in log(folder) and "prepare.freeze [] -> ['head.*']" in log(folder)


@pytest.mark.parametrize("at", [2, 4, 5, 6, 8])
def test_cut_in_a_stage_and_at_its_start(runs: Runs, at: int) -> None:
    """R-51, R-60: inside stage 1, exactly at its end (4), in stage 2, at the start of an epoch and stage 3 (6), in it."""
    given = [*TOWER, *LOSSES, "--stages", THREE, "--optim.ema.decay", "0.9", "--optim.lr_scheduler.warmup", "0"]
    uncut = final(runs.train(*resumable("plain", *given), name="uncut"))
    cut(runs, "plain", at, *given)
    folder = runs.train(*resumable("plain", *given, "--resume", "auto"), name="cut")
    assert differing(uncut, final(folder)) == []
    assert "this resume is bit-exact" in log(folder)
    assert [entry["step"] for entry in metrics(folder, "stage")] == [4, 6]


@pytest.mark.parametrize("at", [3, 7, 8, 10])
def test_a_plateau_ends_a_stage(runs: Runs, at: int) -> None:
    """R-51: after 2 validations without progress, of one every 2 steps, thus at step 6; what it has counted is saved."""
    given = [*TOWER, "--stages", PLATEAU]
    folder = runs.train(*resumable("plain", *given), name="uncut")
    assert [entry["step"] for entry in metrics(folder, "stage")] == [7, 10]
    uncut = final(folder)
    cut(runs, "plain", at, *given)
    assert differing(uncut, final(runs.train(*resumable("plain", *given, "--resume", "auto"), name="cut"))) == []


def test_a_stage_that_is_over_before_it_begins(runs: Runs) -> None:
    """A plateau that comes after the end of the stage that follows it."""
    late = "[{until: plateau, lr_scheduler: {patience: 1, threshold: 0.9}}, {until: 2step, optim: {lr: 1}}, {}]"
    folder = runs.train(*resumable("plain", *TOWER, "--stages", late))
    assert [(entry["step"], entry["stage"]) for entry in metrics(folder, "stage")] == [(7, 3)]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_other_training_data_in_a_stage(runs: Runs, workers: str) -> None:
    """R-51: other arguments of the data set from the next epoch on; cut before, at and after that."""
    given = ["--dataset.train", "{type: tests.test_stages.Scaled}", "--stages", DATA, "--worker", workers]
    folder = runs.train(*resumable("plain", *given), name="uncut")
    uncut = final(folder)
    other = runs.train(*resumable("plain", *given, "--stages", DATA.replace("0.9", "1.0")), name="other")
    losses = [[entry["values"]["loss"] for entry in metrics(each, "train")] for each in (folder, other)]
    assert losses[0][:5] == losses[1][:5] and losses[0][5] != losses[1][5]
    for at in (4, 6, 8) if workers == "0" else (8,):
        cut(runs, "plain", at, *given, name=f"cut{at}")
        again = runs.train(*resumable("plain", *given, "--resume", "auto"), name=f"cut{at}")
        assert differing(uncut, final(again)) == []


def test_a_plateau_waits_for_the_epoch_where_data_change(runs: Runs) -> None:
    stages = "[{until: plateau, lr_scheduler: {patience: 0, threshold: 0.9}}, {dataset: {train: {scale: 0.9}}}]"
    given = ["--dataset.train", "{type: tests.test_stages.Scaled}", "--stages", stages, "--progress.epoch", "3"]
    folder = runs.train(*resumable("plain", *given))
    assert [entry["step"] for entry in metrics(folder, "stage")] == [6]


@pytest.mark.parametrize(
    ("stages", "kept"),
    [
        ("[{until: 5step, freeze: ['stem.*']}, {optim: {lr: 0.1, weight_decay: 0.1}}]", True),
        ("[{until: 5step, freeze: ['stem.*']}, {optim: {args: {betas: [0.8, 0.9]}}}]", False),
        ("[{until: 5step, freeze: ['stem.*']}, {optim: {optim_type: RAdam}}]", False),
    ],
)
def test_moments_stay_with_the_same_optimizer(runs: Runs, stages: str, kept: bool) -> None:
    """R-51: of the parameters that go on; for new parameters and another optimizer they start from nothing."""
    folder = runs.train(*TOWER, "--stages", stages, "--progress.max_steps", "6", "--progress.epoch_val", "-1")
    optimizer = load(folder)["optimizer"]
    steps = {
        name: int(optimizer["state"][number]["step"])
        for number, name in enumerate(optimizer["param_groups"][0]["param_names"])
    }
    assert steps["stem.1.weight"] == 1
    assert steps["head.weight"] == (6 if kept else 1)


def test_batch_norms_move_again(runs: Runs) -> None:
    """R-36: the statistics of a frozen batch norm stand still, in its stage only."""
    stages = "[{until: 2step}, {until: 4step, freeze: ['features.*']}, {}]"
    folder = runs.train("--stages", stages, *EACH_STEP)
    counts = [int(model(folder, step)["features.0.1.num_batches_tracked"]) for step in (2, 4, 6)]
    assert counts == [2, 2, 4]


class Scaled:
    """Digits times a factor; has no file of its own, since `dataset.train` names it by its path."""

    def __new__(cls, data_dir: Path, mode: str, scale: float = 1.0, keep: int = 0) -> Any:
        from custom.datasets.digits_dataset import DigitsDataset

        class Data(DigitsDataset):
            def __len__(self) -> int:
                return keep or super().__len__()

            def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
                item = super().__getitem__(index)
                return {**item, "image": item["image"] * scale}

        return Data(data_dir, mode)
