"""`prepare.convert`: a function gives the model other layers before it is trained; the real torchao too."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from common.model.prepare import convert
from tests.conftest import PROJECT, ErrorOf, Runs, load, metrics, same
from tests.parts import Plain

HERE = "engine.model.test_convert"
PLAIN = ["--model", "{type: tests.parts.Plain}"]


class Coarse(nn.Linear):
    """A linear layer that computes with few bits of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = self.weight + (self.weight.bfloat16().float() - self.weight).detach()
        return nn.functional.linear(x, rounded, self.bias)


def coarse(model: nn.Module) -> nn.Module:
    """Give all linear layers another class; the weights are the same objects."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Coarse
    return model


def emulated(model: nn.Module) -> nn.Module:
    """Fp8 by torchao, emulated in 32 bits, so that a CPU can train with it."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))


def in_place(model: nn.Module) -> None:
    """Forget to return the model."""


def renamed(model: nn.Module) -> nn.Module:
    """Parametrize a weight, which gives it another name."""
    return nn.utils.parametrizations.weight_norm(model.get_submodule("layers.1")) and model


def broken(model: nn.Module) -> nn.Module:
    raise ValueError("no such layer")


def not_callable_here() -> None:
    """Take no model."""


@pytest.mark.slow
def test_fp8_of_torchao_is_trained(runs: Runs, evaluated: object) -> None:
    """The real package: linear layers are replaced, train, and the file is that of an ordinary model."""
    more = [*PLAIN, "--progress.epoch", "3", "--optim.lr", "0.01"]
    plain, fp8 = (
        runs.train(*more, *words, name=name)
        for name, words in (("plain", []), ("fp8", ["--prepare.convert", f"{HERE}:emulated"]))
    )
    text = (fp8 / "train.log").read_text()
    assert f"prepare.convert: {HERE}:emulated replaced layers.1, layers.3" in text
    states = [load(folder)["model"] for folder in (plain, fp8)]
    assert states[0].keys() == states[1].keys() and not same(*states)
    assert {value.dtype for value in states[1].values()} == {torch.float32}
    first = metrics(fp8, "val")[0]["values"]["loss"]
    losses = [metrics(folder, "val")[-1]["values"]["loss"] for folder in (plain, fp8)]
    assert losses[1] < first and losses[1] == pytest.approx(losses[0], rel=0.1)
    values = evaluated(fp8 / "checkpoints" / "latest.pt", "--split", "val")["values"]  # type: ignore[operator]
    assert values["loss"] == pytest.approx(losses[1], rel=0.1) and values["loss"] != losses[1]  # in 32 bits


@pytest.mark.slow
def test_the_recipe_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/optim.md: all linear layers but the one called head."""
    page = (PROJECT / "docs" / "optim.md").read_text()
    (block,) = re.findall(r"```python\n(# custom/to_fp8.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "to_fp8.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    model = nn.ModuleDict({"body": nn.Linear(16, 16), "head": nn.Linear(16, 16)})
    converted = convert(model, "to_fp8:large_layers")
    assert type(converted["body"]).__name__ == "Float8Linear" and type(converted["head"]) is nn.Linear


def test_it_is_applied_before_all_else(runs: Runs) -> None:
    """The converted layers are frozen, compiled and trained; a resume converts again, and is exact."""
    more = [*PLAIN, "--prepare", f"{{convert: '{HERE}:coarse', freeze: ['layers.1.*']}}"]
    more += ["--prepare.compile", "{enabled: true, backend: aot_eager}"]
    whole = runs.train(*more, "--progress.epoch", "2", name="whole")
    assert f"prepare.convert: {HERE}:coarse replaced layers.1, layers.3" in (whole / "train.log").read_text()
    runs.train(*more, "--progress.epoch", "1", name="cut")
    cut = runs.train(*more, "--progress.epoch", "2", "--resume", "auto", name="cut")
    assert "this resume is bit-exact" in (cut / "train.log").read_text()
    assert same(load(whole)["model"], load(cut)["model"])
    frozen = runs.train(*more[:2], "--prepare.freeze", "[layers.1.*]", "--progress.epoch", "2", name="none")
    assert not same(load(whole)["model"], load(frozen)["model"])


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        (f"{HERE}:coars", ["prepare.convert = ", f"{HERE}:coars cannot be imported", "did you mean coarse?"]),
        ("no_such_package.fp8", ["is it a package to install? pip install no_such_package"]),
        (f"{HERE}:HERE", ["is str, not a class or function"]),
        (f"{HERE}:in_place", [f"prepare.convert: {HERE}:in_place returned None", "must return the model"]),
        (f"{HERE}:renamed", ["changed names or shapes of", "layers.1.weight", "in the model's constructor"]),
    ],
)
def test_mistakes(error_of: ErrorOf, name: str, messages: list[str]) -> None:
    text = error_of(*PLAIN, "--prepare.convert", name)
    assert all(message in text for message in messages), text


@pytest.mark.parametrize(("name", "error"), [("broken", ValueError), ("not_callable_here", TypeError)])
def test_an_error_inside_says_where(name: str, error: type[Exception]) -> None:
    """As it is, with a note of the key."""
    with pytest.raises(error) as raised:
        convert(Plain(), f"{HERE}:{name}")
    assert raised.value.__notes__ == [f"in prepare.convert: {HERE}:{name}"]
