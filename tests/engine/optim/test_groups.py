"""Groups of parameters with a learning rate or a weight decay of their own, from the config and from a task."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import field
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from torch import Tensor, nn

from common.base.errors import UserError
from common.config import ConfigError, resolve, section
from common.optim import OptimConfig, build_optimizer
from common.optim.groups import Group, learning_rates
from tests.conftest import Runs, load, metrics, same
from tests.ranks import several
from tests.small import Tower
from custom.tasks.classification_task import ClassificationTask

TOWER = ["--model", "{type: tests.small.Tower}", "--precision.mode", "fp64"]
GROUPED = [
    *TOWER, "--optim.weight_decay", "0.1", "--optim.no_decay", "auto",
    "--optim.groups", "[{match: head.*, lr_mult: 2, weight_decay: 0.2}, {match: '*.layer.weight', lr_mult: 0.5}]",
]  # fmt: skip
# name: (parameters, factor of the rate, weight decay)
REST = [f"layers.{at}.{name}" for at in range(3) for name in ("norm.weight", "norm.bias", "layer.bias")]
TABLE = {
    "rest": (["stem.1.weight"], 1.0, 0.1),
    "rest.no_decay": (["stem.1.bias", *REST], 1.0, 0.0),
    "layer.weight": ([f"layers.{at}.layer.weight" for at in range(3)], 0.5, 0.1),
    "head": (["head.weight"], 2.0, 0.2),
    "head.no_decay": (["head.bias"], 2.0, 0.0),
}


@section
class Root:
    """The section under test."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """how weights change"""


@pytest.fixture
def optim(tmp_path: Path):
    def read(text: str) -> OptimConfig:
        path = tmp_path / "config.yaml"
        path.write_text(f"optim: {text}\n")
        return resolve(Root, [path]).config.optim

    return read


@pytest.fixture
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    number = logger.add(lambda message: lines.append(message.record["message"]), level="INFO")
    yield lines
    logger.remove(number)


def grouped(optimizer: torch.optim.Optimizer) -> dict[str, tuple[Any, ...]]:
    return {
        group["name"]: (group["param_names"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups
    }


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """An optimizer step with gradients that depend on the names of the parameters only."""
    for name, parameter in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(100 * seed + sum(name.encode()))
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    optimizer.step()


# --- from the config ----------------------------------------------------------------------------------------------


def test_every_parameter_is_in_exactly_one_group(runs: Runs) -> None:
    """The product of entries, blocks and no_decay, by train.py; its table in the log; resume."""
    uncut = runs.train(*GROUPED, name="uncut")
    groups = load(uncut)["optimizer"]["param_groups"]
    found = {group["name"]: (group["param_names"], group["lr"] / 1e-3, group["weight_decay"]) for group in groups}
    assert found == {name: (names, pytest.approx(rate), decay) for name, (names, rate, decay) in TABLE.items()}
    listed = [name for names, _, _ in found.values() for name in names]
    assert sorted(listed) == sorted(name for name, _ in Tower().named_parameters())
    log = (uncut / "train.log").read_text()
    assert "5 parameter groups:" in log
    assert "\n  head: 120 parameters, lr 2.00e-03, weight decay 0.2\n" in log
    assert "| lr_rest 1.00e-03  lr_layer.weight 5.00e-04  lr_head 2.00e-03 |" in log
    rates = {name for name in metrics(uncut, "train")[-1]["values"] if name.startswith("lr")}
    assert rates == {f"lr_{name.removesuffix('.no_decay')}" for name in TABLE}

    cut = runs.train(*GROUPED, "--progress.max_steps", "3", name="cut")
    runs.train(*GROUPED, "--resume", str(cut), name="cut")
    assert same(load(uncut)["model"], load(cut)["model"])
    assert same(load(uncut)["optimizer"], load(cut)["optimizer"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_groups_on_two_processes(runs: Runs, strategy: str) -> None:
    """2 processes compute what one does, to the rounding of 64 bits; resumed too, with sharded moments."""
    words = [*GROUPED[:1], "{type: tests.small.Deep}", *GROUPED[2:], "--progress.epoch", "1"]
    runs.train(*words, "--batch_size", "32", name="one")
    several(runs, 2, runs.words(*words, "--batch_size", "16", "--dist.strategy", strategy, name="two"))
    more = ["--resume", "auto", "--batch_size", "16", "--dist.strategy", strategy]
    words = [word if word != "1" else "2" for word in words]
    one = load(runs.train(*words, "--resume", "auto", "--batch_size", "32", name="one"))
    several(runs, 2, runs.words(*words, *more, name="two"))
    two = load(runs.root / "two")
    for name, value in one["model"].items():
        torch.testing.assert_close(value, two["model"][name], rtol=1e-10, atol=1e-12, msg=name)
    assert [group["name"] for group in two["optimizer"]["param_groups"]] == list(TABLE)


def test_the_update_is_that_of_torch_with_the_same_groups(optim) -> None:
    """Against an optimizer built by hand."""
    torch.manual_seed(0)
    model = Tower().double()
    reference = deepcopy(model)
    named = dict(reference.named_parameters())
    text = (
        "{lr: 0.01, weight_decay: 0.1, no_decay: auto,"
        "groups: [{match: head.*, lr_mult: 2, weight_decay: 0.2}, {match: '*.layer.weight', lr_mult: 0.5}]}"
    )
    optimizer = build_optimizer(optim(text), model)
    by_hand = torch.optim.AdamW(
        [
            {"params": [named[name] for name in names], "lr": 0.01 * rate, "weight_decay": decay}
            for names, rate, decay in TABLE.values()
        ]
    )
    for seed in range(3):
        step(model, optimizer, seed)
        step(reference, by_hand, seed)
    assert same(dict(model.state_dict()), dict(reference.state_dict()))


def test_decay_on_matrices_only_is_one_line(runs: Runs) -> None:
    """No class of one's own; one rate in the log, under the name `lr`."""
    folder = runs.train(*TOWER, "--optim.weight_decay", "0.1", "--optim.no_decay", "auto", "--progress.epoch", "1")
    model = Tower()
    groups = {group["name"]: group for group in load(folder)["optimizer"]["param_groups"]}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {"all": 0.1, "all.no_decay": 0.0}
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    assert set(groups["all"]["param_names"]) == matrices
    assert "lr 1.00e-03 |" in (folder / "train.log").read_text()
    assert metrics(folder, "train")[-1]["values"]["lr"] == 1e-3


def test_the_names_of_rates_stay_the_same(runs: Runs) -> None:
    """D11: also where the rates happen to be equal, here 0 at the end."""
    words = ["--optim.groups", "[{match: features.*, lr_mult: 0.1}]", "--progress.log_every", "1"]
    folder = runs.train(*words, "--optim.lr_scheduler", "{type: multistep, args: {lr_steps: [1], lr_gamma: 1e-300}}")
    names = [{name for name in row["values"] if name.startswith("lr")} for row in metrics(folder, "train")]
    assert names == [{"lr_features", "lr_rest"}] * 10
    assert "| lr_features 1.00e-04  lr_rest 1.00e-03 |" in (folder / "train.log").read_text()


class Scaled(nn.Module):
    """Names its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1, 3))

    def no_weight_decay(self) -> set[str]:  # as in timm's models
        return {"scale", "dist_token"}


class Picky(nn.Module):
    """Parameters of every kind that a rule for weight decay meets."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(4, 3))
        self.norm = nn.LayerNorm((4, 3))
        self.table = nn.Embedding(5, 3)
        self.layer = nn.Linear(3, 3)
        self.inner = Scaled()

    def no_weight_decay(self) -> list[str]:
        return ["position"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("auto", ["table.weight", "layer.weight"]),
        ("[auto, table.*]", ["layer.weight"]),
        ("['*.weight']", ["position", "norm.bias", "layer.bias", "inner.scale"]),
        ("[]", None),
    ],
)
def test_what_has_no_weight_decay(optim, text: str, kept: list[str] | None) -> None:
    """One dimension, norms of any shape, the modules' own choice; or patterns alone."""
    model = Picky()
    found = grouped(build_optimizer(optim(f"{{weight_decay: 0.1, no_decay: {text}}}"), model))
    assert found["all"][0] == (kept or [name for name, _ in model.named_parameters()])
    assert ("all.no_decay" in found) == (kept is not None)
    assert list(grouped(build_optimizer(optim(f"{{no_decay: {text}}}"), model))) == ["all"]


def test_groups_of_frozen_and_tied_parameters(optim) -> None:
    """Frozen ones are in none; a tied one is found by any of its names."""
    model = Tower()
    model.layers[0].requires_grad_(False)
    model.head.weight = nn.Parameter(torch.zeros(10, 12))
    model.tied = nn.Linear(12, 10, bias=False)
    model.tied.weight = model.head.weight
    text = "{groups: [{match: layers.*, lr_mult: 0.1}, {match: tied.*, name: tie}, {match: [stem.*, head.bias]}]}"
    found = grouped(build_optimizer(optim(text), model))
    layers = [
        f"layers.{at}.{name}" for at in (1, 2) for name in ("norm.weight", "norm.bias", "layer.weight", "layer.bias")
    ]
    assert {name: (sorted(names), round(rate * 1e3, 9)) for name, (names, rate, _) in found.items()} == {
        "layers": (sorted(layers), 0.1),
        "tie": (["head.weight"], 1.0),
        "stem+head.bias": (["head.bias", "stem.1.bias", "stem.1.weight"], 1.0),
    }


def test_a_rate_of_its_own_as_in_torch(optim: Callable[[str], OptimConfig]) -> None:
    """Not a factor: exact, whatever optim.lr is."""
    groups = "groups: [{match: head.*, lr: 0.07}, {match: layers.0.*, lr: 0.03, lr_mult: 1}]"

    def rates(text: str) -> dict[str, float]:
        return learning_rates(build_optimizer(optim(text), Tower()))

    assert rates(f"{{lr: 0.003, {groups}}}") == {"head": 0.07, "layers.0": 0.03, "rest": 0.003}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--optim.groups=[{match: head.*, lr: 1e-3, lr_mult: 2}]", ["optim.groups[0].lr = 0.001", "lr_mult", "remove"]),
        ("--optim.groups=[{match: head.*, lr: 0}]", ["optim.groups[0].lr = 0", "greater than 0"]),
        ("--optim.groups=[{match: featurs.*}]", ["[0].match: featurs.* matches none", "did you mean features."]),
        (
            "--optim.groups=[{match: features.*}, {match: '*.bias'}]",
            ["features.0.1.bias is in features and in bias: each"],
        ),
        ("--optim.groups=[{match: features.0.*}, {match: fea*}]", ["in features.0 and in fea: each"]),
        ("--optim.groups=[{match: []}]", ["optim.groups[0].match", "at least 1"]),
        ("--optim.groups=[{lr_mult: 2}]", ["optim.groups[0].match", "is required"]),
        (
            "--optim.groups=[{match: head.*, lr_mul: 2}]",
            ["optim.groups[0].lr_mul", "did you mean optim.groups[0].lr_mu"],
        ),
        ("--optim.groups=[{match: head.*, lr_mult: 0}]", ["optim.groups[0].lr_mult = 0", "greater than 0"]),
        ("--optim.groups=[head.*]", ["optim.groups[0]", "must be a mapping"]),
        ("--optim.groups=[{match: features.*, name: a}, {match: head.*, name: a, lr_mult: 2}]", ["are called a"]),
        ("--optim.no_decay=[haed.2.*]", ["optim.no_decay: haed.2.* matches none", "did you mean head.2"]),
    ],
)
def test_mistakes_are_explained(runs: Runs, capsys: pytest.CaptureFixture[str], words: str, says: list[str]) -> None:
    """The key, what was written, and what to do; before the first step."""
    try:
        assert runs.fail(*words.split("=", 1)) == 2
        text = "".join(capsys.readouterr())
    except UserError as error:  # found before there is a run
        text = str(error)
    for part in says:
        assert part in text, text


def test_groups_of_optimizers_without_them(optim) -> None:
    """LBFGS has one group, Rprop no decay."""
    with pytest.raises(UserError, match=r"LBFGS cannot train Tower.*parameter groups"):
        build_optimizer(optim("{optim_type: LBFGS, groups: [{match: head.*}]}"), Tower())
    with pytest.raises(ConfigError, match=r"optim\.groups\[0\]\.weight_decay = 0\.1"):
        optim("{optim_type: Rprop, groups: [{match: head.*, weight_decay: 0.1}]}")
    found = build_optimizer(optim("{optim_type: Rprop, groups: [{match: head.*, lr_mult: 2}]}"), Tower())
    assert learning_rates(found) == {"rest": 1e-3, "head": 2e-3}


# --- resume -------------------------------------------------------------------------------------------------------


def test_a_resume_may_regroup(runs: Runs) -> None:
    """Refused without allow_changes; with it, each parameter keeps its moments, whatever group it is in."""
    folder = runs.train(*TOWER, "--progress.max_steps", "3")
    before = load(folder)["optimizer"]
    words = [*GROUPED, "--resume", "auto", "--progress.max_steps", "3"]
    assert runs.fail(*words) == 2
    log = (folder / "train.log").read_text()
    assert "optim.groups [] ->" in log
    runs.train(*words[:-1], "4", "--allow_changes", "true", "--optim.lr", "1e-30")
    after = load(folder)["optimizer"]
    assert [group["name"] for group in before["param_groups"]] == ["all"]
    assert {group["name"] for group in after["param_groups"]} == TABLE.keys()

    def moments(state: dict[str, Any]) -> dict[str, Tensor]:
        names = [name for group in state["param_groups"] for name in group["param_names"]]
        return {name: state["state"][number]["exp_avg_sq"] for number, name in enumerate(names)}

    old, new = moments(before), moments(after)
    for name, value in old.items():  # one more step: v' = 0.999 v + 0.001 g^2
        assert (new[name] >= 0.999 * value).all() and not torch.equal(new[name], value), name


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_loaded_state_is_matched_by_name(optim, name: str) -> None:
    """From other groups and another order; a changed set of parameters is refused."""
    args = "{momentum: 0.9}" if name == "SGD" else "{}"
    plain = optim(f"{{optim_type: {name}, args: {args}}}")
    groups = optim(f"{{optim_type: {name}, args: {args}, groups: [{{match: b.*, name: second}}]}}")
    one, two = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), nn.ModuleDict()
    two.update({"b": deepcopy(one["b"]), "a": deepcopy(one["a"])})
    first, second = build_optimizer(plain, one), build_optimizer(groups, two)
    step(one, first, 0)
    two.load_state_dict(one.state_dict())
    second.load_state_dict(deepcopy(first.state_dict()))
    for seed in (1, 2):
        step(one, first, seed)
        step(two, second, seed)
    assert same(dict(sorted(one.state_dict().items())), dict(sorted(two.state_dict().items())))
    third = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    with pytest.raises(UserError, match=r"not of the trained parameters: b\.bias, b\.weight, c\.bias, c\.weight"):
        build_optimizer(plain, third).load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=r"not of the trained parameters: b\.bias, b\.weight"):
        first.load_state_dict(build_optimizer(plain, nn.ModuleDict({"a": nn.Linear(2, 2)})).state_dict())


@pytest.mark.slow
def test_a_checkpoint_that_knows_no_groups(runs: Runs) -> None:
    """Of a version without these keys; they count as their defaults, so nothing has changed."""
    uncut = load(runs.train(*TOWER, name="uncut"))
    folder = runs.train(*TOWER, "--progress.epoch", "1")
    file = folder / "checkpoints" / "latest.pt"
    state = load(folder)
    for key in ("groups", "no_decay"):
        del state["about"]["config"]["optim"][key]
    torch.save(state, file)
    runs.train(*TOWER, "--resume", str(file))
    assert same(load(folder)["model"], uncut["model"]) and same(load(folder)["optimizer"], uncut["optimizer"])
    torch.save(state, file)
    assert runs.fail(*TOWER, "--resume", str(file), "--optim.no_decay", "auto") == 2
    assert "optim.no_decay [] -> auto" in (folder / "train.log").read_text()


class Counting(torch.optim.SGD):
    """Keeps a number of its own in each group, as schedule-free and D-adaptive optimizers do."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group["k"] = 0


def test_an_optimizer_keeps_its_own_numbers(optim) -> None:
    """What a group holds besides arguments is state, and comes from the checkpoint; arguments from the config."""
    path = f"{{optim_type: '{__name__}:Counting', weight_decay: "
    saved = build_optimizer(optim(f"{path}0.1}}"), Tower())
    saved.param_groups[0]["k"] = 7
    live = build_optimizer(optim(f"{path}0.2, groups: [{{match: head.*}}]}}"), Tower())
    live.load_state_dict(saved.state_dict())
    assert [(group["k"], group["weight_decay"]) for group in live.param_groups] == [(7, 0.2), (7, 0.2)]


# --- from a task --------------------------------------------------------------------------------------------------


def test_a_task_gives_groups_of_its_own(optim, logged: list[str]) -> None:
    """Its groups first, the config for the rest; no_decay applies in both."""
    model = Tower()
    own = [
        Group("tail", model.head.parameters(), lr_mult=10),
        Group("first", [model.get_parameter("stem.1.weight")], weight_decay=0.3),
    ]
    config = optim("{weight_decay: 0.1, no_decay: auto, groups: [{match: '*.weight', lr_mult: 0.5, name: matrices}]}")
    optimizer = build_optimizer(config, model, own)
    found = grouped(optimizer)
    assert {name: (len(names), round(rate * 1e3, 9), decay) for name, (names, rate, decay) in found.items()} == {
        "first": (1, 1.0, 0.3),
        "rest.no_decay": (7, 1.0, 0.0),
        "matrices": (3, 0.5, 0.1),
        "matrices.no_decay": (3, 0.5, 0.0),
        "tail": (1, 10.0, 0.1),
        "tail.no_decay": (1, 10.0, 0.0),
    }
    assert logged[-1].startswith("6 parameter groups:\n")


class Staged(ClassificationTask):
    """The head at twice the rate."""

    def groups(self) -> list[Group]:
        named = dict(self.named_parameters())
        return [
            Group("stem", [named["stem.1.weight"], named["stem.1.bias"]]),
            Group("head", [named["head.weight"], named["head.bias"]], lr_mult=2.0, weight_decay=0.3),
        ]


def test_a_task_with_groups_in_a_run(runs: Runs) -> None:
    """Each group in two halves, with decay and without."""
    words = [
        *TOWER,
        "--task",
        f"{{type: {__name__}.Staged}}",
        "--optim.weight_decay",
        "0.1",
        "--optim.no_decay",
        "auto",
    ]
    state = load(runs.train(*words, "--progress.max_steps", "1"))
    groups = {group["name"]: group for group in state["optimizer"]["param_groups"]}
    assert {name: (len(group["params"]), group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "stem": (1, 1e-3, 0.1),
        "stem.no_decay": (1, 1e-3, 0.0),
        "rest": (3, 1e-3, 0.1),
        "rest.no_decay": (9, 1e-3, 0.0),
        "head": (1, 2e-3, 0.3),
        "head.no_decay": (1, 2e-3, 0.0),
    }


def test_wrong_groups_of_a_task(optim) -> None:
    """Every parameter is in one group, and belongs to the task."""
    model = Tower()
    twice = [Group("a", model.head.parameters()), Group("b", [model.head.bias, model.get_parameter("stem.1.bias")])]
    with pytest.raises(UserError, match=r"^groups\(\): head\.bias is in a and in b: each"):
        build_optimizer(optim("{}"), model, twice)
    with pytest.raises(
        UserError, match=r"groups\(\): c has a parameter of shape \(3, 2\) that is not part of the task"
    ):
        build_optimizer(optim("{}"), model, [Group("c", nn.Linear(2, 3).parameters())])
    with pytest.raises(UserError, match="two groups of parameters are called head"):
        build_optimizer(
            optim("{groups: [{match: stem.*, name: head}]}"), model, [Group("head", model.head.parameters(), 2.0)]
        )
