"""Stages of a run, and weights of losses that change: through the config and train.py, cut and resumed anywhere."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from common.base.errors import UserError, with_notes
from common.config import ConfigError
from common.model import fixed
import evaluate
import train
from tests.conftest import CONFIG, Runs, load, metrics, same
from tests.parts.stages.test_stages import CE, EACH_STEP, LOSSES, PLATEAU, THREE, TOWER, log, model
from tests.ranks import several
from tests.resume import differing, final, same_after_cut
from tests.resume import words as resumable
from tests.small import Tower
from tests.test_task import TURNS, apart


def test_another_limit_of_clipping_in_a_stage(runs: Runs) -> None:
    """It holds from the end of the first stage on; so near to 0 that nothing is learnt."""
    sgd, stages = ["--optim.optim_type", "SGD"], "[{until: 1}, {optim: {clip_gradients: 1e-20}}]"
    long = runs.train(*resumable("plain", *sgd, "--stages", stages), name="long")
    short = runs.train(*resumable("plain", *sgd, "--progress.max_steps", "5"), name="short")
    learnt = [load(run)["model"] for run in (long, short)]
    names = [name for name in learnt[0] if name.endswith(("weight", "bias"))]
    assert names and [name for name in names if not same(learnt[0][name], learnt[1][name])] == []


def test_a_stage_that_is_over_before_it_begins(runs: Runs) -> None:
    """A plateau that comes after the end of the stage that follows it."""
    plateau = "{until: plateau, patience: 1, threshold: 0.9}"
    late = f"[{plateau}, {{until: 2step, optim: {{lr: 1}}}}, {{}}]"
    folder = runs.train(*resumable("plain", *TOWER, "--stages", late))
    assert [(entry["step"], entry["stage"]) for entry in metrics(folder, "stage")] == [(7, 3)]


@pytest.mark.parametrize(
    ("stages", "kept"),
    [
        ("[{until: 5step, freeze: ['stem.*']}, {optim: {lr: 0.1, weight_decay: 0.1}}]", True),
        ("[{until: 5step, freeze: ['stem.*']}, {optim: {optim_type: ADAMW}}]", True),
        ("[{until: 5step, freeze: ['stem.*']}, {optim: {optim_type: torch.optim.AdamW}}]", True),
        ("[{until: 5step, freeze: ['stem.*']}, {optim: {args: {betas: [0.8, 0.9]}}}]", False),
        ("[{until: 5step, freeze: ['stem.*']}, {optim: {optim_type: RAdam}}]", False),
    ],
)
def test_moments_stay_with_the_same_optimizer(runs: Runs, stages: str, kept: bool) -> None:
    """Of the parameters that continue; for new parameters and another optimizer they start from nothing."""
    folder = runs.train(*TOWER, "--stages", stages, "--progress.max_steps", "6", "--progress.epoch_val", "-1")
    optimizer = load(folder)["optimizer"]
    steps = {
        name: int(optimizer["state"][number]["step"])
        for number, name in enumerate(optimizer["param_groups"][0]["param_names"])
    }
    assert steps["stem.1.weight"] == 1
    assert steps["head.weight"] == (6 if kept else 1)


def test_batch_norms_move_again(runs: Runs) -> None:
    """The statistics of a frozen batch norm stand still, in its stage only."""
    stages = "[{until: 2step}, {until: 4step, freeze: ['features.*']}, {}]"
    folder = runs.train("--stages", stages, *EACH_STEP)
    counts = [int(model(folder, step)["features.0.1.num_batches_tracked"]) for step in (2, 4, 6)]
    assert counts == [2, 2, 4]


@pytest.mark.slow
def test_an_evaluation_has_the_weights_of_its_checkpoint(runs: Runs, evaluated: Callable[..., dict[str, Any]]) -> None:
    """evaluate.py measures the same loss as the run did, in any stage and at any weight."""
    stages = "[{until: 1.2epoch}, {loss: {size: {weight: 3}}}]"
    folder = runs.train(*LOSSES, "--stages", stages, *EACH_STEP, "--progress.epoch_val", "0.2")
    measured = {entry["step"]: entry["values"] for entry in metrics(folder, "val")}
    for step in (5, 6, 7, 9):
        values = evaluated(folder / "checkpoints" / f"step_{step:08}.pt", "--split", "val")["values"]
        assert values == measured[step], step


@pytest.mark.slow
@pytest.mark.parametrize("stages", [THREE.replace("layers.*", "layers.0.*"), PLATEAU])
def test_two_ranks_train_as_one(runs: Runs, stages: str) -> None:
    """The same weights in every stage; data of a size that is no multiple of the step's."""
    tower = "{type: engine.test_stages.Still}"
    given = ["--model", tower, "--loss", CE, "--stages", stages, "--precision.mode", "fp64", *EACH_STEP]
    given += ["--debug.max_samples", "149", "--progress.epoch_val", "0.4epoch"]
    runs.train(*given, name="one")
    several(runs, 2, runs.words(*given, "--batch_size", "16", name="two"))
    for step in range(1, 11):
        one, two = model(runs.root / "one", step), model(runs.root / "two", step)
        assert all(torch.allclose(one[name], two[name], rtol=0, atol=1e-12) for name in one), step
    starts = [[entry["step"] for entry in metrics(runs.root / name, "stage")] for name in ("one", "two")]
    assert starts[0] == starts[1] and len(starts[0]) == 2


@pytest.mark.slow
def test_sharded_ranks_in_stages(runs: Runs) -> None:
    """FSDP with another optimizer, rate and weight per stage; cut at the start of a stage and resumed."""
    stages = (
        "[{until: 4step, optim: {lr: 0.01}}, {until: 7step}, {optim: {optim_type: SGD}, loss: {size: {weight: 2}}}]"
    )
    model = ["--model", "{type: engine.test_stages.Still}", "--loss", CE, "--stages", stages]
    given = resumable("plain", *model, "--precision.mode", "fp64")
    runs.train(*given, name="one")
    sharded = [*given, "--batch_size", "16", "--dist.strategy", "fsdp"]
    several(runs, 2, runs.words(*sharded, name="two"))
    apart(load(runs.root / "one"), load(runs.root / "two"))
    several(runs, 2, runs.words(*sharded, name="cut"), at=5)
    several(runs, 2, runs.words(*sharded, "--resume", "auto", name="cut"))
    assert differing(final(runs.root / "two"), final(runs.root / "cut")) == []


def test_a_debug_run_has_no_later_stages(runs: Runs) -> None:
    """It is shorter than its stages."""
    folder = runs.train("--debug", "--stages", "[{until: 30epoch}, {optim: {lr: 1}}]", name="debug")
    assert metrics(folder, "stage") == []


@pytest.mark.slow
def test_two_updates_on_two_ranks(runs: Runs) -> None:
    """A task with several updates, each of which is wrapped anew."""
    given = [*TURNS, "--stages", "[{until: 4step}, {optim: {lr: 0.01}}]", "--precision.mode", "fp64"]
    alone = runs.train(*given, name="alone")
    several(runs, 2, runs.words(*given, "--batch_size", "16", name="two"))
    apart(load(alone), load(runs.root / "two"))
    assert len(metrics(runs.root / "two", "stage")) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["[{until: 1epoch, frezze: [a]}, {}]"], ["stages[0].frezze", "unknown key", "did you mean stages[0].freeze?"]),
        (["[{until: 1epoch}, {batch_size: 3}]"], ["stages[1].batch_size = 3", "unknown key"]),
        (["[{until: 1epoch}, {optim: {lrr: 1}}]"], ["stages[1].optim.lrr", "did you mean optim.lr?"]),
        (["[{until: 1epoch}, {optim: {lr: -1}}]"], ["stages[1].optim.lr = -1", "greater than 0"]),
        (["[{until: 1epoch, optim: {lr_scheduler: cosine}}, {}]"], ["lr_scheduler = 'cosine'", "must be a mapping"]),
        (["[{until: 1epoch, optim: {lr_scheduler: {tmax: 0}}}, {}]"], ["lr_scheduler.tmax = 0", "must be above 0"]),
        (["[{until: soon}, {}]"], ["stages[0].until = 'soon'", "plateau"]),
        (["[{until: 0}, {}]"], ["stages[0].until = 0", "needs an end"]),
        (["[{}, {}]"], ["stages[0].until", "needs an end"]),
        (["[{until: 1epoch}]"], ["stages[0].until", "the last stage ends with the run"]),
        (["[{until: plateau}, {}]", "--dataset.val", "null"], ["stages[0].until = 'plateau'", "needs dataset.val"]),
        (["[{until: plateau}, {}]", "--progress.epoch_val", "-1"], ["progress.epoch_val"]),
        (["[{until: 1epoch, freeze: [a]}, {}]", "--dist.strategy", "fsdp"], ["stages[0].freeze", "fsdp"]),
        (["[{until: 1epoch, optim: {accumulate: 2}}, {}]"], ["stages[0].optim.accumulate = 2", "cannot change"]),
        (["[{until: 1epoch, loss: {other: {weight: 1}}}, {}]"], ["stages[0].loss.other", "none of the losses"]),
        (["[{until: 1epoch, loss: {CrossEntropyLoss: {label_smoothing: 0.1}}}, {}]"], ["label_smoothing = 0.1"]),
        (["[{until: 1epoch, optim: {optim_type: SGD, args: {betas: [0, 0]}}}, {}]"], ["stages[0].optim.args.betas"]),
    ],
)
def test_a_stage_that_cannot_be_is_refused(runs: Runs, words: list[str], message: list[str]) -> None:
    """Where it is written, and before anything is built."""
    with pytest.raises(ConfigError) as caught:
        runs.train("--stages", *words)
    assert all(part in str(caught.value) for part in message), str(caught.value)
    assert list(runs.root.iterdir()) == []


def test_a_mistake_in_a_stage_names_its_line(runs: Runs, tmp_path: Path) -> None:
    """Like any other key; what is wrong in the run's own settings is not reported again for each stage."""
    file = tmp_path / "run.yaml"
    file.write_text(f"$BASE: {CONFIG}\nstages:\n  - until: 1epoch\n  - optim:\n      lr: fast\nmodel:\n  wdth: 3\n")
    with pytest.raises(ConfigError) as caught:
        train.main(["--config", str(file)])
    assert "stages[1].optim.lr = 'fast'  (" in str(caught.value) and "run.yaml:5)" in str(caught.value)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("[{until: 2epoch}, {}]", "stages[0].until 2epoch is step 10; it must be after step 0 and before the end"),
        ("[{until: 4step}, {until: 0.5epoch}, {}]", "stages[1].until 0.5epoch is step 2; it must be after step 4"),
        ("[{until: 1epoch}, {freeze: [stm.*]}]", "prepare.freeze: stm.* matches none"),
        ("[{until: 1epoch}, {freeze: ['*']}]", "every parameter is frozen"),
        ("[{until: 1epoch}, {optim: {groups: [{match: 'stm.*'}]}}]", "optim.groups[0].match: stm.* matches none"),
        (
            "[{until: 2step}, {optim: {lr_scheduler: {type: cosine, warmup: 3epoch}}}]",
            "is reached at step 8, in a warm-up of 15",
        ),
    ],
)
def test_a_stage_that_does_not_fit_the_run_is_refused(runs: Runs, stages: str, message: str) -> None:
    """Before the first step, not when the stage begins."""
    try:
        assert runs.fail(*TOWER, "--stages", stages) == 2
        text = log(runs.root / "run")
    except UserError as error:
        text = with_notes(error)
    assert message in text and "stages[" in text
    assert "step 1/" not in text


def test_a_weight_that_cannot_be_is_refused(runs: Runs) -> None:
    with pytest.raises(ConfigError, match=r"loss.CrossEntropyLoss.weight = 'heavy'[^$]*must be a valid number"):
        runs.train("--loss.CrossEntropyLoss.weight", "heavy")


@pytest.mark.slow
def test_changed_stages_are_refused_on_resume(runs: Runs) -> None:
    """What is trained would change; with allow_changes, there must still be such a stage."""
    given = [*TOWER, "--progress.max_steps", "6", "--stages"]
    runs.train(*given, "[{until: 4step}, {until: 5step}, {}]")
    assert runs.fail(*given, "[{until: 3step}, {}]", "--resume", "auto") == 2
    assert "alter what is trained:\n  stages [{'until': '4step'" in log(runs.root / "run")
    assert runs.fail(*given, "[{until: 3step}, {}]", "--resume", "auto", "--allow_changes", "true") == 2
    assert "is in stage 3, but there are only 2" in log(runs.root / "run")


class Still(Tower):
    """Without dropout, so that gradients do not depend on how samples are shared among processes."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0


def test_an_evaluation_with_fewer_stages_is_refused(runs: Runs) -> None:
    """The config of another run: the weights of the checkpoint's losses are not known."""
    folder = runs.train("--stages", "[{until: 2step}, {loss: {CrossEntropyLoss: {weight: 0.5}}}]")
    model = str(folder / "checkpoints" / "latest.pt")
    with pytest.raises(UserError, match="in stage 2, but the config has 0 stages"):
        evaluate.main(["--model_pt", model, "--stages", "[]"])


class Teacher(Tower):
    """Batch norms, and a copy of them that is always in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(batch=True)
        self.teacher = fixed(deepcopy(self.layers))


def test_a_fixed_module_stays_in_evaluation_mode(runs: Runs) -> None:
    """A pattern that froze its norms too is no longer true in the next stage."""
    stages = "[{until: 1epoch, freeze: ['*norm*']}, {}]"
    folder = runs.train("--model", f"{{$REPLACE: true, type: {__name__}.Teacher}}", "--stages", stages)
    weights = load(folder)["model"]
    counts = {name: int(value) for name, value in weights.items() if name.endswith("num_batches_tracked")}
    assert {"teacher" in name: count > 0 for name, count in counts.items()} == {False: True, True: False}


def slower(trainer: Any) -> None:
    """A plugin: half the learning rate, by a hook on the optimizer of the first stage."""

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    trainer.optimizer.register_step_pre_hook(halve)


@pytest.mark.parametrize(
    "more",
    [
        ["--plugins", "[engine.test_stages:slower]", "--stages", "[{until: 8step}, {}]"],
        ["--optim.optim_type", "Adafactor", "--stages", "[{until: 8step}, {optim: {lr: 0.01}}]"],
    ],
    ids=["hooks of a plugin", "moments"],
)
def test_a_resume_in_the_first_stage_keeps(runs: Runs, more: list[str]) -> None:
    """What the plugin of the first start did in it; and for the next stage, the moments, as without a resume."""
    same_after_cut(runs, "plain", *TOWER, *more, at=4)


def test_a_run_without_stages_continues_with_some(runs: Runs) -> None:
    """It was in the first."""
    runs.train(*TOWER, "--progress.epoch", "1")
    words = ["--resume", "auto", "--allow_changes", "true", "--stages", "[{until: 7step}, {optim: {lr: 0.5}}]"]
    folder = runs.train(*TOWER, "--progress.epoch", "2", *words)
    assert [(entry["step"], entry["stage"]) for entry in metrics(folder, "stage")] == [(8, 2)]


def test_a_closure_trains_all_parameters_at_once(runs: Runs) -> None:
    """LBFGS would move those of the other updates too."""
    with pytest.raises(SystemExit):
        runs.train(*TURNS[:-2], "--optim.optim_type", "LBFGS")
    said = "LBFGS moves all parameters together, and Turns.updates trains some of them"
    assert said in (runs.root / "run" / "train.log").read_text()
