"""`optim.bad_steps`: steps whose loss or gradient is not finite, or a spike, are left out, alike on all processes."""

import math
import signal
from itertools import chain
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from common.base.errors import UserError
from common.progress import Position
from common.run.paths import RunPaths
from tests.conftest import ErrorOf, Runs, load, metrics, same
from tests.data.test_data import Noisy, stream_of
from tests.parts.bad_steps.test_bad_steps import BAD, DATA, REWIND, SKIP, remember, states
from tests.parts.reduction.test_reduction import FIXED, on
from tests.ranks import start_ranks
from tests.resume import same_after_cut
from tests.test_task import TURNS, Turns
from tools.verify.replay import read_segment

FSDP = ["--dist.strategy", "fsdp"]


class Spiked:
    """Cross entropy, a hundred times as large in one training call, or `factor` times."""

    def __init__(self, at: int, factor: float = 100) -> None:
        self.at, self.factor, self.calls = at, factor, 0

    def __call__(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        self.calls += torch.is_grad_enabled()
        loss = nn.functional.cross_entropy(output["logits"], batch["label"])
        return loss * self.factor if torch.is_grad_enabled() and self.calls == self.at else loss


def spiked(at: int, factor: float = 100) -> list[str]:
    return ["--loss", f"{{$REPLACE: true, ce: {{type: {__name__}.Spiked, at: {at}, factor: {factor}}}}}"]


def test_a_gradient_alone(runs: Runs) -> None:
    loss = "{$REPLACE: true, ce: {type: tests.small.NanGradient, at: 5}}"
    [entry] = metrics(runs.train("--loss", loss, *SKIP), "skipped")
    assert entry["step"] == 5 and entry["why"] == "its gradient norm is nan"


def test_no_more_than_some_in_a_row(runs: Runs) -> None:
    loss = "{$REPLACE: true, ce: {type: tests.small.NotANumber, after: 4}}"
    assert runs.fail("--loss", loss, *SKIP, "--optim.bad_steps.limit", "2") == 2
    assert [entry["step"] for entry in metrics(runs.root / "run", "skipped")] == [5, 6]
    text = (runs.root / "run" / "train.log").read_text()
    assert "step 7 is bad, as were 2 before it: its loss is nan, of train samples" in text


@pytest.mark.slow
def test_a_spike(runs: Runs) -> None:
    """Far above the last steps: of the loss, or of the gradient; without `spike` it is a step like others."""
    words = [*spiked(41), "--progress.epoch", "10", "--progress.epoch_save_latest", "-1"]
    spike = ["--optim.bad_steps.spike", "8"]
    skipped = metrics(runs.train(*words, *SKIP, *spike), "skipped")
    assert [entry["step"] for entry in skipped] == [41] and "its loss is" in skipped[0]["why"]
    assert metrics(runs.train(*words, *SKIP, name="usual"), "skipped") == []
    assert runs.fail(*words, *spike, name="stop") == 2
    assert "step 41 is bad: its loss is" in (runs.root / "stop" / "train.log").read_text()


def test_a_step_that_the_loss_scaler_leaves_out(runs: Runs) -> None:
    """Its gradients overflow, and nothing is wrong: no bad step, also where none is allowed."""
    plugin = ["--plugins", f"[{remember.__module__}:remember]", "--precision.mode", "fp16"]
    folder = runs.train(*spiked(5, 1e6), *plugin, "--optim.bad_steps.spike", "8")
    assert metrics(folder, "skipped") == [] and load(folder)["precision"]["scale"] == 2**15
    assert same(states[5]["AdamW"], states[4]["AdamW"]) and not same(states[6]["AdamW"], states[5]["AdamW"])


def test_the_first_step(runs: Runs) -> None:
    """There is no loss to log yet."""
    folder = runs.train(*spiked(1, math.nan), *SKIP, "--progress.log_every", "1")
    assert [entry["step"] for entry in metrics(folder, "skipped")] == [1]
    assert ["loss" in entry["values"] for entry in metrics(folder, "train")] == [False] + 9 * [True]


def test_one_update_of_several(runs: Runs) -> None:
    """The other one is taken."""
    plugin = ["--plugins", f"[{remember.__module__}:remember]", "--progress.epoch_val", "-1"]
    [entry] = metrics(runs.train(*TURNS, *spiked(4, math.nan), *SKIP, *plugin), "skipped")
    before, after = (states[step]["Turns"] for step in (3, 4))
    assert entry["step"] == 4 and entry["why"] == "in update first, its loss is nan"
    assert {name.split(".")[0] for name in after if not same(after[name], before[name])} == {"second"}


def test_the_samples_of_several_steps() -> None:
    """Across the ends of epochs; what is not full is no longer."""
    stream, at, expected = stream_of(Noisy()), Position(epoch_size=10), list[int]()
    for _ in range(7):
        step = next(stream.plan.global_batches(stream.order(at.epoch), at))
        expected += chain(*step.indices)
        at = step.after
    assert stream.samples(Position(epoch_size=10), 7) == expected and at.epoch == 1 and at.sample == 9


def test_a_rewind_of_a_run_that_got_a_policy_later(runs: Runs) -> None:
    """It goes to the checkpoint with which the policy began, though another one was saved since, not as planned."""
    runs.train("--progress.epoch", "1")
    later = ["--progress.epoch", "2", "--progress.epoch_save_latest", "-1", "--progress.epoch_val", "-1"]
    later += ["--progress.epoch_save_checkpoint", "-1"]
    folder = runs.train(*REWIND, *later, "--resume", "auto", "--allow_changes", "true")
    assert load(folder)["bad_steps"]["anchor"] == 5


@pytest.mark.slow
def test_a_rewind(runs: Runs) -> None:
    """Weights, optimizer and what spikes are compared with are the checkpoint's; batches since are skipped."""
    plugin = ["--plugins", f"[{remember.__module__}:remember]"]
    save = ["--progress.epoch_save_latest", "2step", "--progress.epoch_val", "-1"]
    folder = runs.train(*DATA, *REWIND, *plugin, *save, "--progress.max_steps", "40", "--progress.epoch", "8")
    skipped = metrics(folder, "skipped")
    assert len(skipped) == 8 and {entry["step"] - entry["first"] for entry in skipped} == {0, 1}
    for entry in skipped:
        assert same(states[entry["step"]], states[entry["first"] - 1])
        steps = entry["step"] - entry["first"] + 1  # at the end of an epoch, a sample may be in both
        assert BAD in entry["samples"] and 32 * steps - 32 < len(entry["samples"]) <= 32 * steps
    assert "; rewound to step" in (folder / "train.log").read_text()


@pytest.mark.slow
def test_a_rewind_past_a_save_that_was_not_planned(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was never stopped has no such checkpoint; the one before it is still there."""
    words = [*DATA, *REWIND, "--progress.epoch_save_latest", "2step", "--progress.epoch_val", "-1"]
    words += ["--loss", "{$REPLACE: true, ce: {type: tests.small.Signalled}}"]
    uncut = runs.train(*words, name="uncut")
    monkeypatch.setenv("SIGNAL_AT", f"3 {signal.SIGTERM.value}")
    assert runs.fail(*words) == 128 + signal.SIGTERM and load(runs.root / "run")["position"]["step"] == 3
    monkeypatch.delenv("SIGNAL_AT")
    stopped = runs.train(*words, "--resume", "auto")
    timed = runs.train(*words, "--progress.save_time", "0.000001", name="timed")
    for folder in (stopped, timed):
        assert metrics(folder, "skipped") == metrics(uncut, "skipped") and metrics(folder, "skipped")[0]["first"] == 3
        assert same(load(folder)["model"], load(uncut)["model"])


def test_a_replay_begins_where_it_can_rewind(runs: Runs) -> None:
    """Not at a checkpoint that was saved by the clock: the replay would lack the planned one before it."""
    words = [*DATA, *REWIND, "--progress.epoch_save_latest", "2step", "--progress.save_time", "0.000001"]
    folder = runs.train(*words, "--progress.epoch_val", "-1", "--progress.max_steps", "6")
    assert load(folder, "previous")["bad_steps"]["anchor"] == 4
    assert read_segment(RunPaths(folder), None).name == "start"
    with pytest.raises(UserError, match=r"--from previous.pt: its run would rewind .*--from start"):
        read_segment(RunPaths(folder), "previous.pt")


def test_a_rewind_to_another_runs_checkpoint(runs: Runs) -> None:
    """The run was continued under another name, and has saved nothing yet."""
    words = [*DATA, *REWIND, "--progress.epoch_save_latest", "2step", "--progress.epoch_val", "-1"]
    first = runs.train(*words, "--progress.max_steps", "2", name="first")
    resumed = ["--resume", str(first / "checkpoints" / "latest.pt"), "--progress.max_steps", "5"]
    [entry] = metrics(runs.train(*words, *resumed, name="second"), "skipped")
    assert (entry["first"], entry["step"]) == (3, 4)


def test_nothing_to_go_back_to(runs: Runs) -> None:
    assert runs.fail(*DATA, *REWIND, "--progress.epoch_save_latest", "-1", "--progress.epoch_val", "-1") == 2
    folder = runs.root / "run"
    said = f"and there is nothing to rewind to; there is no {folder}/checkpoints/latest.pt"
    assert said in (folder / "train.log").read_text()


@pytest.mark.slow
def test_nothing_to_go_back_to_after_a_signal(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was saved for the signal is none of the planned checkpoints."""
    words = [*DATA, *REWIND, "--progress.epoch_save_latest", "-1", "--progress.epoch_val", "-1"]
    words += ["--loss", "{$REPLACE: true, ce: {type: tests.small.Signalled}}"]
    monkeypatch.setenv("SIGNAL_AT", f"2 {signal.SIGTERM.value}")
    assert runs.fail(*words) == 128 + signal.SIGTERM
    monkeypatch.delenv("SIGNAL_AT")
    assert runs.fail(*words, "--resume", "auto") == 2
    assert "there is nothing to rewind to" in (runs.root / "run" / "train.log").read_text()


def test_a_policy_that_is_new_to_a_run(runs: Runs) -> None:
    """A run that ended with the error may go on from its last checkpoint, which knows of no policy."""
    save = ["--progress.epoch_save_latest", "2step", "--progress.epoch_val", "-1"]
    assert runs.fail(*DATA, *save) == 2
    folder = runs.train(*DATA, *REWIND, *save, "--resume", "auto", "--progress.max_steps", "8")
    assert [entry["first"] for entry in metrics(folder, "skipped")] == [3]


class TwoUpdates(Turns):
    """Two updates in each step, of which the first, or both, are bad from the fourth step on."""

    bad: ClassVar[tuple[str, ...]] = ("first",)

    def updates(self) -> tuple[str, ...]:
        return ("first", "second")

    def update(self, name: str, batch: Any) -> Any:
        losses = super().update(name, batch)
        if self.at.step >= 3 and name in self.bad:
            losses["loss"] = losses["loss"] * math.nan
        return losses


class BothBad(TwoUpdates):
    bad = ("first", "second")


@pytest.mark.parametrize("task", ["TwoUpdates", "BothBad"])
def test_the_limit_is_of_steps_not_of_updates(runs: Runs, task: str) -> None:
    """A good update beside a bad one ends no row, and two bad ones of a step are one."""
    words = [*TURNS[2:], "--task.type", f"{__name__}.{task}", *SKIP, "--optim.bad_steps.limit", "2"]
    assert runs.fail(*words, "--progress.epoch_val", "-1") == 2
    assert {entry["step"] for entry in metrics(runs.root / "run", "skipped")} == {4, 5}


@pytest.mark.slow
@pytest.mark.parametrize("words", [SKIP, REWIND])
def test_an_exact_resume(runs: Runs, words: list[str]) -> None:
    """With bad steps before the cut and after it."""
    save = ["--progress.epoch_save_latest", "2step", "--optim.bad_steps.spike", "1000"]
    uncut, cut = same_after_cut(runs, "warm-up", *DATA, *words, *save, at=9)
    assert metrics(uncut, "skipped") == metrics(cut, "skipped") != []
    assert len(load(cut)["bad_steps"]["last"]["all"]) > 5


@pytest.mark.slow
@pytest.mark.parametrize("words", [SKIP, REWIND, [*REWIND, *FSDP]])
def test_two_processes_agree(runs: Runs, words: list[str]) -> None:
    """The sample is on one of them; both leave the step out, and a resume is exact."""
    save = ["--progress.epoch_save_latest", "2step", "--batch_size", "16"]
    uncut, cut = same_after_cut(runs, "warm-up", *DATA, *words, *save, at=9, ranks=2)
    assert metrics(uncut, "skipped") == metrics(cut, "skipped") != []
    for entry in metrics(uncut, "skipped"):
        assert len(entry["samples"]) == 32 * (entry["step"] - entry["first"] + 1)


@pytest.mark.slow
def test_one_process_has_it(runs: Runs) -> None:
    """From then on in each step, so that both end for the same reason."""
    loss = "{$REPLACE: true, ce: {type: tests.small.NanOnRank1}}"
    ended = start_ranks(runs.root, 2, runs.words("--loss", loss, *SKIP))
    assert set(ended.codes) <= {1, 2} and 2 in ended.codes
    assert "as were 3 before it: its loss is nan" in ended.texts[0]


@pytest.mark.slow
def test_any_number_of_processes(runs: Runs) -> None:
    """With `dist.reduction: fixed`: the same steps, the same bits."""
    one, two = on(runs, [1, 2], *FIXED, *DATA, *REWIND, "--progress.epoch_save_latest", "2step")
    assert one == two
    assert metrics(runs.root / "on_1", "skipped") == metrics(runs.root / "on_2", "skipped") != []


@pytest.mark.slow
def test_a_stopped_run_goes_on(runs: Runs) -> None:
    """Without leave to change what is trained: until the bad step, it trains the same."""
    assert runs.fail(*DATA, "--progress.epoch_save_latest", "1step") == 2
    folder = runs.train(*DATA, *SKIP, "--resume", "auto", "--progress.epoch_save_latest", "1step")
    assert len(metrics(folder, "skipped")) == 2
    whole = runs.train(*DATA, *SKIP, "--progress.epoch_save_latest", "1step", name="whole")
    assert same(load(folder)["model"], load(whole)["model"])


def test_mistakes(error_of: ErrorOf) -> None:
    closure = ["--optim.optim_type", "LBFGS", "--optim.weight_decay", "0"]
    assert "LBFGS changes weights before a step can be judged" in error_of(*SKIP, *closure)
    assert "optim.bad_steps.action" in error_of("--optim.bad_steps.action", "ignore")
    assert "optim.bad_steps.limit" in error_of("--optim.bad_steps.limit", "0")
