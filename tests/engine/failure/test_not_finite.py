"""A loss that is not finite ends the run before the optimizer uses it: on one process and on several."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from common import finite
from common.failure.program import TrainingError
from common.progress import Position
from common.trainer import Trainer
from tests.conftest import Runs, load, metrics
from tests.ranks import start_ranks
from tests.samples import Classification
from tests.small import NanGradient

BAD = ["--loss", "{$REPLACE: true, ce: {type: tests.small.NotANumber, after: 5}}"]
# No log line, no validation and no save after the first step: nothing else looks at the losses.
UNSEEN = ["--progress.log_every", "-1", "--progress.epoch_val", "-1", "--progress.epoch_save_latest", "-1"]
weights: list[dict[str, torch.Tensor]] = []


def remember(trainer: Trainer) -> None:
    """A plug-in: the weights after each step, and last those that the run ended with."""
    weights.clear()

    def copy() -> None:
        weights.append({name: value.detach().clone() for name, value in trainer.task.named_parameters()})

    trainer.monitor.after_step.append(copy)
    trainer.saver.wait = copy  # type: ignore[method-assign]  # called by the error


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ([], 6),
        (["--optim.accumulate", "2", "--batch_size", "16"], 3),
        (["--optim.clip_gradients", "1"], 6),
        (["--precision.mode", "fp16"], 6),
    ],
    ids=["plain", "accumulated", "clipped", "scaled"],
)
def test_no_step_is_taken_with_it(runs: Runs, words: list[str], step: int) -> None:
    """The weights stay those before that step; the error names the step, the rank and the samples."""
    assert runs.fail(*BAD, *UNSEEN, *words, "--plugins", f"[{__name__}:remember]") == 2
    text = (runs.root / "run" / "train.log").read_text()
    assert re.search(rf"the loss of step {step} is not a finite number \(rank 0, of train samples \d+, ", text)
    *_, before, last = weights
    assert len(weights) == step
    assert all(torch.equal(value, before[name]) for name, value in last.items())
    assert all(value.isfinite().all() for value in last.values())


STEEP = "{$REPLACE: true, ce: {type: tests.small.NanGradient, at: 5, always: true}}"


class Turns(Classification):
    """Two updates in each step."""

    def updates(self) -> Sequence[str]:
        return "body", "head"

    def trained_by(self, update: str) -> Iterator[nn.Parameter]:
        return (p for name, p in self.model.named_parameters() if name.startswith("head") == (update == "head"))

    def update(self, name: str, batch: Any) -> Any:
        return self.losses(self.output(batch), batch)


@pytest.mark.parametrize(
    ("words", "step", "named"),
    [
        ([], 5, "the gradient of step 5, of"),
        (["--optim.accumulate", "2", "--batch_size", "16"], 3, "the gradient of step 3, of"),
        (["--optim.clip_gradients", "1"], 5, "the gradient of step 5, of"),
        (["--precision.mode", "bf16"], 5, "the gradient of step 5, of"),
        (["--task.type", f"{__name__}.Turns"], 3, "the gradient of update body of step 3, of"),
        (
            ["--optim.optim_type", "LBFGS", "--optim.weight_decay", "0", "--optim.args", "{max_iter: 2}"],
            3,
            "the gradient of step 3, of",
        ),
    ],
    ids=["plain", "accumulated", "clipped", "bf16", "updates", "closure"],
)
def test_a_gradient_that_is_not_finite(runs: Runs, words: list[str], step: int, named: str) -> None:
    """Ends the run at its own step, though every loss is finite."""
    assert runs.fail("--loss", STEEP, *UNSEEN, *words, "--plugins", f"[{__name__}:remember]") == 2
    text = (runs.root / "run" / "train.log").read_text()
    assert re.search(named + r" train samples (\d+, ){8}\.\.\. \(32 in all\), has the norm nan, though the mean", text)
    *_, before, last = weights
    assert len(weights) == step
    if "--task.type" not in words:
        assert all(torch.equal(value, before[name]) for name, value in last.items())


@pytest.mark.slow
def test_a_gradient_on_two_ranks(runs: Runs) -> None:
    """It is the sum of both, so the samples of both are named."""
    loss = f"{{$REPLACE: true, ce: {{type: {__name__}.SteepOnRank1, at: 7}}}}"
    ended = start_ranks(runs.root, 2, runs.words("--loss", loss, *UNSEEN))
    assert 2 in ended.codes
    assert re.search(r"the gradient of step [45], of train samples (\d+, ){8}\.\.\. \(64 in all\)", ended.texts[0])


class SteepOnRank1(NanGradient):
    def __call__(self, output: Any, batch: Any) -> torch.Tensor:
        self.always = os.environ.get("RANK") == "1"
        self.calls = min(self.calls, self.at - 2 if not self.always else self.calls)
        return super().__call__(output, batch)


def test_a_gradient_that_overflows_in_fp16(runs: Runs) -> None:
    """Its step is skipped, and counted in the line and in the record."""
    loss = "{$REPLACE: true, ce: {type: tests.small.NanGradient, at: 3}}"
    folder = runs.train("--loss", loss, "--precision.mode", "fp16", "--optim.clip_gradients", "1")
    text = (folder / "train.log").read_text()
    assert re.search(r"step  4/10 .* \| skipped 1 of 2 \|", text) and text.count("skipped 1 of") == 1
    assert [entry["values"].get("skipped", 0) for entry in metrics(folder, "train")] == [0, 1, 0, 0, 0]


def test_in_fp16_gradients_are_left_to_the_scaler(runs: Runs) -> None:
    """A policy for bad steps judges losses; what may be the scale's doing is skipped, and counted."""
    words = ["--optim.bad_steps", "{action: skip, limit: 2}", "--precision.mode", "fp16"]
    folder = runs.train("--loss", STEEP, *words)
    assert metrics(folder, "skipped") == []
    assert "| skipped 2 of 2 |" in (folder / "train.log").read_text()


class Scale:
    """A precision whose scale halves with every step, or stays."""

    def __init__(self, first: float, factor: float) -> None:
        self.value, self.factor = first, factor
        self.scaler = self

    def get_scale(self) -> float:
        self.value *= self.factor
        return self.value


@pytest.mark.parametrize(
    ("first", "factor", "taken", "ended"),
    [
        (2.0**16, 0.5, 1, 17),
        (2.0**30, 0.5, 1, 20),
        (1.0, 0.5, 1, 1),
    ],
)
def test_steps_that_are_skipped_for_ever(first: float, factor: float, taken: int, ended: int) -> None:
    scaled = finite.ScaledSteps(Scale(first, factor), Mock())

    def steps() -> None:
        for step in range(100):
            scaled.add(step + 1, taken=step < taken)

    with pytest.raises(TrainingError, match=f"the last {ended} steps, to step {taken + ended}, are not finite"):
        steps()


class Logging(Classification):
    """Logs a value that is infinite from the seventh step on."""

    def losses(self, output: Any, batch: Any) -> Any:
        return super().losses(output, batch) | {"ratio": torch.tensor(1.0 if self.at.step < 6 else math.inf)}


def test_a_value_of_ones_own_is_named(runs: Runs) -> None:
    """It stops the run at the next log line, as a loss does at once."""
    assert runs.fail("--task.type", f"{__name__}.Logging", "--progress.log_every", "8") == 2
    text = (runs.root / "run" / "train.log").read_text()
    assert re.search(r"ERROR .* ratio of step 7 is not a finite number \(rank 0, of train samples \d+, ", text)


def test_its_samples_are_named_after_a_change_of_the_batch_size(runs: Runs) -> None:
    """Steps before the resume took fewer: the position counts, not the number of the step."""
    words = ["--task.type", f"{__name__}.Logging", "--loader.order", "{type: sequential}", "--progress.log_every", "8"]
    runs.train(*words, "--batch_size", "16", "--progress.max_steps", "4")
    resumed = ["--batch_size", "32", "--resume", "auto", "--allow_changes", "true"]
    assert runs.fail(*words, *resumed) == 2
    text = (runs.root / "run" / "train.log").read_text()
    first = 4 * 16 + 2 * 32
    assert f"ratio of step 7 is not a finite number (rank 0, of train samples {first}, {first + 1}, " in text


def test_no_line_search_goes_on_with_it(runs: Runs) -> None:
    """An optimizer with a closure evaluates the loss several times in a step."""
    words = ["--optim.optim_type", "LBFGS", "--optim.weight_decay", "0", "--optim.args", "{max_iter: 2}"]
    assert runs.fail(*BAD, *UNSEEN, *words) == 2
    assert "the loss of step 3 is not a finite number" in (runs.root / "run" / "train.log").read_text()


@pytest.mark.slow
def test_no_rank_takes_a_step_with_it(runs: Runs) -> None:
    """The others wait for the gradient of the rank with the error, which ends them all."""
    loss = "{$REPLACE: true, ce: {type: tests.small.NanOnRank1}}"
    ended = start_ranks(runs.root, 2, runs.words("--loss", loss, *UNSEEN, "--plugins", f"[{__name__}:taken]"))
    assert any(ended.codes)
    assert "the loss of step 3 is not a finite number (rank 1, of train samples" in ended.texts[0]
    assert "weights of step 3" not in "".join(ended.texts)


def taken(trainer: Trainer) -> None:
    """A plug-in: says when the third step was taken, whatever its weights."""
    step = trainer.optimizer.step

    def step_done(*arguments: Any) -> Any:
        if trainer.at.step == 2:
            print("weights of step 3", flush=True)
        return step(*arguments)

    trainer.optimizer.step = step_done  # type: ignore[method-assign, assignment]


def unchecked(trainer: Trainer) -> None:
    """A plug-in: no batch's own loss is looked at, as for the last one before a save on a GPU."""
    trainer.optimizer_step.check = trainer.optimizer_step.loss_check = None


@pytest.mark.slow
def test_nothing_of_it_is_saved(runs: Runs) -> None:
    """Before a save, the rank whose loss it was ends the others, which wait to compare their weights."""
    loss = "{$REPLACE: true, ce: {type: tests.small.NanOnRank1}}"
    words = ["--loss", loss, *UNSEEN[:-1], "1step", "--plugins", f"[{__name__}:unchecked]"]
    ended = start_ranks(runs.root, 2, runs.words(*words))
    assert all(ended.codes)
    assert ended.texts[0].count("the loss of step 3 is not a finite number (rank 1, of train samples") == 1
    assert load(runs.root / "run")["position"]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize(("last", "is_finite"), [(1.0, True), (torch.nan, False), (torch.inf, False)])
def test_which_gradients_are_finite(dtype: torch.dtype, last: float, is_finite: bool) -> None:
    """A parameter without a gradient counts for nothing."""
    weights = [nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(3)]
    check = finite.LossCheck(Mock(), Mock(), Mock())
    check._stream.samples.return_value = [3]  # type: ignore[attr-defined]
    check.gradients(Position(), "all", weights, None)
    weights[0].grad = torch.ones(4, dtype=dtype)
    weights[1].grad = torch.tensor([1e-40, -0.0, 1e18, last], dtype=dtype)
    with nullcontext() if is_finite else pytest.raises(TrainingError, match="the gradient of step 1"):
        check.gradients(Position(), "all", weights, None)


def test_gradients_whose_squares_overflow() -> None:
    """Adam would divide by the infinite mean of their squares from then on: its weights would never change again."""
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), 1e21)
    check = finite.LossCheck(Mock(), Mock(), Mock())
    check._stream.samples.return_value = [3]  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="the gradient of step 1, of train samples 3, has the norm inf"):
        check.gradients(Position(), "all", [weight], None)


def test_which_weights_are_finite() -> None:
    """Also those whose squares overflow; a shard may be empty."""
    large = [torch.full((2,), 1e21), torch.full((1000, 1000), 100.0).half(), torch.empty(0)]
    assert finite.are_finite([*large, torch.tensor([1e200], dtype=torch.float64)])
    assert finite.are_finite([torch.empty(0)])
    assert not finite.are_finite([*large, torch.tensor([0.0, torch.nan])])
    assert not finite.are_finite([torch.tensor([0.0, -torch.inf])])


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    finite.LossCheck(Mock(), Mock(), Mock()).gradients(Position(), "all", [table.weight], None)
