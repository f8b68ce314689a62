"""A loss that is not finite ends the run before the optimizer uses it: on one process and on several."""

import math
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from common.checkpoint import finite
from common.trainer import Trainer
from tests.conftest import Runs, load
from tests.ranks import start_ranks
from tests.samples import Classification

BAD = ["--loss", "{$REPLACE: true, ce: {type: tests.parts.NotANumber, after: 5}}"]
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


class Logging(Classification):
    """Logs a value that is infinite from the seventh step on."""

    def losses(self, output: Any, batch: Any) -> Any:
        return super().losses(output, batch) | {"ratio": torch.tensor(1.0 if self.at.step < 6 else math.inf)}


def test_a_value_of_ones_own_is_named(runs: Runs) -> None:
    """It stops the run at the next log line, as a loss does at once."""
    assert runs.fail("--task.type", f"{__name__}.Logging", "--progress.log_every", "8") == 2
    text = (runs.root / "run" / "train.log").read_text()
    assert re.search(r"ERROR .* ratio of step 7 is not a finite number \(rank 0, of train samples \d+, ", text)


def test_no_line_search_goes_on_with_it(runs: Runs) -> None:
    """An optimizer with a closure evaluates the loss several times in a step."""
    words = ["--optim.optim_type", "LBFGS", "--optim.weight_decay", "0", "--optim.args", "{max_iter: 2}"]
    assert runs.fail(*BAD, *UNSEEN, *words) == 2
    assert "the loss of step 3 is not a finite number" in (runs.root / "run" / "train.log").read_text()


@pytest.mark.slow
def test_no_rank_takes_a_step_with_it(runs: Runs) -> None:
    """The others wait for the gradient of the rank with the error, which ends them all."""
    loss = "{$REPLACE: true, ce: {type: tests.parts.NanOnRank1}}"
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
    trainer.optimizer_step.check = None


@pytest.mark.slow
def test_nothing_of_it_is_saved(runs: Runs) -> None:
    """Before a save, the rank whose loss it was ends the others, which wait to compare their weights."""
    loss = "{$REPLACE: true, ce: {type: tests.parts.NanOnRank1}}"
    words = ["--loss", loss, *UNSEEN[:-1], "1step", "--plugins", f"[{__name__}:unchecked]"]
    ended = start_ranks(runs.root, 2, runs.words(*words))
    assert all(ended.codes)
    assert ended.texts[0].count("the loss of step 3 is not a finite number (rank 1, of train samples") == 1
    assert load(runs.root / "run")["position"]["step"] == 2


class OnGpu(torch.Tensor):
    """A loss that says it is on a GPU."""

    is_cpu, is_cuda = False, True


def test_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value is looked at with the next loss, before that one's optimizer step."""
    waited: list[int] = []
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(finite, "bad_loss", lambda step, *_: ArithmeticError(f"step {step}"))
    check = finite.LossCheck(Mock(), Mock(), Mock())
    check(1, torch.tensor(1.0).as_subclass(OnGpu))
    check(2, torch.tensor(math.nan).as_subclass(OnGpu))
    assert len(waited) == 1
    with pytest.raises(ArithmeticError, match="step 2"):
        check(3, torch.tensor(1.0).as_subclass(OnGpu))
