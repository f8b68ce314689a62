"""An optimizer for each group, and optimizers of other packages: they train, and resume exactly, or say why not."""

import json
import re
import sys
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

from common.base.errors import UserError
from common.base.parts import AVERAGE
from common.config import ConfigError, resolve
from common.optim import build_optimizer
from common.optim.groups import Group
from common.optim.schedule import Schedule
from engine.conftest import AVERAGED
from parts.stages.stages import take_over
from tests.conftest import ENVIRONMENT, PROJECT, Runs, load, metrics, run, same
from tests.optim.test_optim import TORCH_OPTIMIZERS, Root, loss_of, mlp, train
from tests.parts.optimizers.test_optimizers import MATRICES
from tests.ranks import several
from tests.resume import same_after_cut, words
from custom.tasks.classification_task import ClassificationTask

HERE = "engine.optim.test_kinds"
TOWER = ["--model", "{type: tests.small.Tower}"]


@pytest.fixture
def configured(tmp_path: Path):
    def read(**sections: str) -> Root:
        path = tmp_path / "config.yaml"
        path.write_text("".join(f"{name}: {text}\n" for name, text in sections.items()))
        return resolve(Root, [path]).config

    return read


@pytest.fixture
def warnings() -> Any:
    lines: list[str] = []
    number = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    yield lines
    logger.remove(number)


# name: more keys of optim
PYPI = {
    "schedulefree.AdamWScheduleFree": "args: {warmup_steps: 3}",
    "schedulefree.SGDScheduleFree": "",
    "schedulefree.RAdamScheduleFree": "",
    "lion_pytorch.Lion": "weight_decay: 0.1",
    "prodigyopt.Prodigy": "args: {safeguard_warmup: true, d0: 0.01}",
    "pytorch_optimizer.SOAP": "args: {precondition_frequency: 2}",
    "pytorch_optimizer.Shampoo": "",
    "pytorch_optimizer.Adan": "weight_decay: 0.1",
    "pytorch_optimizer.AdEMAMix": "",
    "pytorch_optimizer.CAME": "",
    "pytorch_optimizer.Lamb": "",
    "pytorch_optimizer.ScheduleFreeAdamW": "",
}
REFUSED = {
    "Muon": "Muon cannot train Sequential: Muon only supports 2D parameters",
    "pytorch_optimizer.Muon": "Muon cannot train Sequential: `use_muon` must be set",
}


@pytest.mark.parametrize(
    "name", [*TORCH_OPTIMIZERS, *PYPI, *(name for name in REFUSED if name not in TORCH_OPTIMIZERS)]
)
def test_every_optimizer_resumes_to_the_bit_or_is_refused_before_the_start(configured, warnings, name: str) -> None:
    """Through a file, into another object; what cannot do that is no optimizer of a run."""
    config = configured(optim=f"{{optim_type: {name}, lr: 0.01, {PYPI.get(name, '')}}}").optim
    model, file = mlp(), BytesIO()
    if name in REFUSED:
        with pytest.raises(UserError, match=re.escape(REFUSED[name])):
            build_optimizer(config, model)
        return

    def start() -> torch.optim.Optimizer:
        optimizer = build_optimizer(config, model)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    optimizer, before = start(), loss_of(model).item()
    train(model, optimizer, 5)
    torch.save({"optimizer": optimizer.state_dict(), "model": deepcopy(model.state_dict())}, file)
    train(model, optimizer, 5)
    uncut = deepcopy(model.state_dict())
    file.seek(0)
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer = start()
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, 5)
    assert same(model.state_dict(), uncut)
    assert loss_of(model).item() < before
    assert warnings == []


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ("[{match: 0.*, optim_type: AdmW}]", ["optim.groups[0].optim_type", "did you mean AdamW"]),
        ("[{match: 0.*, optim_type: Muon, args: {betas: [0, 0]}}]", ["optim.groups[0].args.betas", "Muon"]),
        ("[{match: 0.*, optim_type: Rprop, weight_decay: 0.1}]", ["groups[0].weight_decay", "Rprop has none"]),
    ],
)
def test_mistakes_in_a_group_are_refused_with_the_config(configured, groups: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        configured(optim=f"{{groups: {groups}}}")
    for text in says:
        assert text in str(raised.value)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ("[{match: '*.weigth', optim_type: Muon}]", ["optim.groups[0].match", "did you mean"]),
        (
            "[{match: 0.*, optim_type: Muon}]",
            ["cannot train Sequential", "torch.Size([8])", "optim.groups can give"],
        ),
        ("[{match: '*', ndim: 4, optim_type: Muon}]", ["optim.groups[0].ndim", "matching * has 4 dimensions"]),
        ("[{match: 0.*, optim_type: SGD}, {match: '*.bias'}]", ["0.bias is in 0 and in bias", "in one group only"]),
    ],
)
def test_mistakes_in_a_group_name_the_parameter(configured, groups: str, says: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        build_optimizer(configured(optim=f"{{groups: {groups}}}").optim, mlp())
    for text in says:
        assert text in str(raised.value)


def test_a_state_fits_its_optimizer_only(configured) -> None:
    """Groups may change at a resume, as long as each parameter keeps its class."""
    start = lambda groups: build_optimizer(configured(optim=f"{{groups: {groups}}}").optim, mlp())  # noqa: E731
    saved = start("[{match: '*', ndim: 2, optim_type: Muon}]").state_dict()
    moved = start("[{match: 0.weight, optim_type: muon}, {match: 2.weight, optim_type: torch.optim.Muon, lr_mult: 2}]")
    moved.load_state_dict(deepcopy(saved))
    for groups in ("[]", "[{match: 0.weight, optim_type: Muon}]", "[{match: '*', ndim: 2, optim_type: SGD}]"):
        with pytest.raises(UserError, match=r"\d.weight had torch.optim.Muon, and the state of one optimizer"):
            start(groups).load_state_dict(deepcopy(saved))
    with pytest.raises(UserError, match=r"0.weight had that of optim, and"):
        moved.load_state_dict(deepcopy(start("[]").state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "more"),
    [
        (
            20,
            [
                *("--optim.clip_gradients", "0.5", "--batch_size", "12", "--optim.accumulate", "3"),
                *("--optim.lr_scheduler.type", "wsd"),
            ],
        ),
        (8, ["--stages", "[{until: 4step, freeze: [head.*]}, {optim: {lr: 0.01}}]"]),
    ],
    ids=["step", "stages"],
)
def test_several_optimizers_resume_exactly(runs: Runs, at: int, more: list[str]) -> None:
    """With all that a step may have, the loss scale and the average of the weights too; as one optimizer does."""
    same_after_cut(runs, "fp16", *TOWER, "--optim.groups", MATRICES, *more, at=at)


@pytest.mark.slow
def test_sharded_matrices_are_trained_as_whole_ones(runs: Runs) -> None:
    """Muon needs the whole matrix: under FSDP, the losses are those of DDP but for rounding in Muon's 16 bits."""
    more = [*TOWER, "--optim.groups", MATRICES]
    uncut, _ = same_after_cut(runs, "plain", *more, "--dist.strategy", "fsdp", ranks=2, at=5)
    several(runs, 2, runs.words(*words("plain", *more), name="ddp"))
    whole, sharded = (
        [entry["values"]["loss"] for entry in metrics(path, "val")] for path in (runs.root / "ddp", uncut)
    )
    assert whole == pytest.approx(sharded, rel=1e-2)


def test_a_stage_keeps_the_state_of_each_parameter(configured) -> None:
    """Where class and arguments stay; a parameter whose optimizer changes begins anew."""
    model = mlp()
    first = build_optimizer(configured(optim="{groups: [{match: '*', ndim: 2, optim_type: Muon}]}").optim, model)
    train(model, first, 2)
    groups = "[{match: 0.weight, optim_type: Muon, lr_mult: 3}, {match: 2.weight, args: {eps: 1e-5}}]"
    second = build_optimizer(configured(optim=f"{{groups: {groups}}}").optim, model)
    take_over(second, first)
    kept = {name for name, parameter in model.named_parameters() if second.state.get(parameter)}
    assert kept == {"0.weight", "0.bias", "2.bias"}
    train(model, second, 1)
    assert second.state[model[2].weight]["step"] == 1


class Duel(ClassificationTask):
    """Two updates, each with a rate and a class of its own."""

    def updates(self) -> list[str]:
        return ["body", "head"]

    def trained_by(self, update: str) -> Any:
        is_head = lambda name: name.startswith("head.")  # noqa: E731
        return [p for name, p in self.model.named_parameters() if is_head(name) == (update == "head")]

    def groups(self) -> list[Group]:
        head = self.model.get_submodule("head")
        return [Group("head", head.parameters(), lr_mult=5.0, optim_type="RMSprop", args={"momentum": 0.5})]


@pytest.mark.slow
def test_a_task_has_an_optimizer_for_each_of_its_updates(runs: Runs) -> None:
    """As a GAN with two rates and two classes: each steps in its own update only, and resumes exactly."""
    uncut, _ = same_after_cut(runs, "plain", *TOWER, "--task", f"{{type: {HERE}.Duel}}", at=16)
    state = load(uncut)["optimizer"]
    steps = {int(moment["step"]) for moment in state["state"].values()}
    assert steps == {10}
    assert [(g["name"], g["lr"], "square_avg" in state["state"][g["params"][0]]) for g in state["param_groups"]] == [
        ("rest", 1e-3, False),
        ("head", 5e-3, True),
    ]


# Optimizers with modes.

FREE = [*TOWER, "--optim.optim_type", "schedulefree.AdamWScheduleFree", "--optim.lr", "0.01"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "at", "more"),
    [
        (1, 9, ["--stages", "[{until: 4step}, {optim: {lr: 0.02}}]", "--optim.groups", MATRICES]),
        (2, 5, ["--dist.strategy", "fsdp"]),
    ],
    ids=["stages", "fsdp"],
)
def test_a_schedule_free_run_resumes_exactly(runs: Runs, ranks: int, at: int, more: list[str]) -> None:
    """P13: killed between two steps, with an evaluation every other step, and a save after each."""
    uncut, _ = same_after_cut(runs, "plain", *FREE, *more, ranks=ranks, at=at)
    state = load(uncut)
    free = [group for group in state["optimizer"]["param_groups"] if "train_mode" in group]
    assert free
    assert all(group["train_mode"] and group["k"] == state["position"]["step"] for group in free)


@pytest.mark.slow
def test_the_average_of_an_optimizer_is_what_is_measured_and_used(runs: Runs, evaluated: Any) -> None:
    """P13: by validation and by evaluate.py; training goes on with the same bits."""
    more = [*FREE, "--optim.args", "{betas: [0.9, 0.99]}"]
    folder, often = runs.train(*more), runs.train(*more, "--progress.epoch_val", "1step", name="often")
    state = load(folder)
    moments = state["optimizer"]["state"]
    names = [name for group in state["optimizer"]["param_groups"] for name in group["param_names"]]
    for number, name in enumerate(names):
        trained, average = state["model"][name], state[AVERAGE]["shadow"][name]
        assert not torch.equal(trained, average)
        torch.testing.assert_close(trained, average.lerp(moments[number]["z"], 0.1))
    best = folder / "checkpoints" / "latest.pt"
    assert evaluated(best, "--split", "val")["values"]["loss"] == metrics(folder, "val")[-1]["values"]["loss"]
    assert all(same(load(often)[part], state[part]) for part in ("model", "optimizer", AVERAGE))


def test_an_average_of_an_average_is_refused(error_of: Any) -> None:
    """There would be two, of which each claims to be what is measured."""
    said = error_of(*FREE, *AVERAGED)
    assert "decay: AdamWScheduleFree averages the weights itself; set it to 0" in said


# Schedules.


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.5, 0]),
        ("args: {decay: 0.5}, min_factor: 0.2", [1, 1, 1, 1, 1, 1, 0.84, 0.68, 0.52, 0.36, 0.2]),
        ("args: {decay: 0.4, shape: cosine}", [1, 1, 1, 1, 1, 1, 1, 0.8535533905932737, 0.5, 0.14644660940672627, 0]),
        ("args: {decay: 0.4, shape: sqrt}", [1, 1, 1, 1, 1, 1, 1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0]),
    ],
)
def test_warm_up_stable_decay(configured, keys: str, expected: list[float]) -> None:
    """The rate rises with the warm-up, stays, and falls over the last part of the run."""
    config = configured(optim=f"{{lr: 1.0, lr_scheduler: {{type: wsd, warmup: 2step, {keys}}}}}").optim
    schedule = Schedule(config.lr_scheduler, build_optimizer(config, mlp()), 12, None)
    rates = [schedule.factor(step) for step in range(13)]
    assert rates == pytest.approx([1 / 3, 2 / 3, *expected])


@pytest.mark.slow
def test_a_recording_sees_several_optimizers_as_one(runs: Runs) -> None:
    """tools.same compares gradients and states once for each update."""
    environment = {**ENVIRONMENT, "RECORD_DIR": str(runs.root), "PYTHONPATH": str(PROJECT / "tools" / "record")}
    argv = runs.words(*TOWER, "--optim.groups", MATRICES, "--plugins", "[recorder.attach]", "--progress.epoch", "1")
    ended = run([sys.executable, "train.py", *argv], env=environment)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (runs.root / "rank0.jsonl").read_text().split("\n") if line]
    after = [row for row in rows if row["kind"] in ("gradient", "state")]
    assert {row["kind"] for row in after} == {"gradient", "state"}
    assert not any("#" in row["name"] for row in after)
