"""The moving average of the weights."""

from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.checkpoint.weights import averaged_state_dict
from common.config import resolve, section
from common.optim import OptimConfig
from common.progress import Position
from parts.ema.average import Ema
from tests.checkpoint.test_state import MODEL, resumed_is_uncut
from tests.conftest import Runs, load, metrics, same
from tests.resume import same_after_cut

Evaluated = Callable[..., dict[str, Any]]
FIXED = "{decay: 0.9, warmup: false}"
AVERAGED = ["--optim.ema.decay", "0.9"]


@section
class Root:
    """The section under test."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """how weights change"""


@pytest.fixture
def build(tmp_path: Path):
    def make(text: str, model: nn.Module) -> Ema:
        path = tmp_path / "config.yaml"
        path.write_text(f"optim: {{ema: {text}}}\n")
        optim: Any = resolve(Root, [path]).config.optim
        return Ema(optim.ema, model)

    return make


class Net(nn.Module):
    """Every kind of tensor a model may hold: parameters, tied and half precision ones, buffers saved or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.layer.weight
        self.narrow = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.norm(self.layer(x)))


def moved(model: nn.Module, step: int) -> None:
    """Pretend a training step: every weight and buffer changes."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    model.train()
    model(torch.randn(4, 3, generator=generator))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("warmup", [False, True])
def test_the_average_is_the_weighted_sum_of_all_weights(build, warmup: bool) -> None:
    """Closed form per update; running statistics averaged too, the count of batches is the model's own."""
    model = Net()
    ema = build(f"{{decay: 0.9, warmup: {str(warmup).lower()}}}", model)
    expected = {name: tensor.double() for name, tensor in values(model).items()}
    for n in range(30):
        moved(model, n)
        ema.update(model, Position())
        decay = min(0.9, (1 + n) / (10 + n)) if warmup else 0.9
        for name, tensor in values(model).items():
            expected[name] = decay * expected[name] + (1 - decay) * tensor.double()
    shadow = ema.state_dict()["shadow"]
    assert averaged_state_dict(values(model), {"ema": ema.state_dict()})["norm.num_batches_tracked"].item() == 30
    assert set(shadow) == expected.keys() - {"norm.num_batches_tracked"}
    for name in shadow:
        torch.testing.assert_close(shadow[name].double(), expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert "scratch" not in shadow


def test_evaluation_sees_the_average_and_training_its_own_weights(build) -> None:
    """Within `applied` the model has the averages; afterwards every bit is back, after an error too."""
    model = Net()
    ema = build(FIXED, model)
    moved(model, 0)
    ema.update(model, Position())
    own, averaged = values(model), averaged_state_dict(model.state_dict(), {"ema": ema.state_dict()})
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert not same(own, averaged)
    with ema.applied(model):
        assert same(values(model), averaged)
        assert model.tied.weight is model.layer.weight
    assert same(values(model), own)
    with pytest.raises(ZeroDivisionError), torch.inference_mode(), ema.applied(model):
        raise ZeroDivisionError
    assert same(values(model), own)
    assert places == [tensor.data_ptr() for tensor in model.state_dict().values()]
    moved(model, 1)  # and training continues
    ema.update(model, Position())
    model(torch.ones(4, 3)).sum().backward()
    assert model.layer.weight.grad is not None


def test_a_saved_average_continues_bit_for_bit(build, tmp_path: Path) -> None:
    """Save, safe load, continue: as if never stopped, with the decay's warm-up and `every`."""
    text = "{decay: 0.99, every: 2}"
    uncut_model, cut_model = Net(), Net()
    cut_model.load_state_dict(uncut_model.state_dict())
    uncut, first = build(text, uncut_model), build(text, cut_model)
    for n in range(11):
        moved(uncut_model, n)
        uncut.update(uncut_model, Position())
    for n in range(5):
        moved(cut_model, n)
        first.update(cut_model, Position())
    torch.save({"model": cut_model.state_dict(), "ema": first.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed_model = Net()
    resumed_model.load_state_dict(state["model"])
    second = build(text, resumed_model)
    second.load_state_dict(state["ema"])
    assert same(second.state_dict()["shadow"], first.state_dict()["shadow"])
    for n in range(5, 11):
        moved(resumed_model, n)
        second.update(resumed_model, Position())
    ended, expected = second.state_dict(), uncut.state_dict()
    assert (ended["updates"], ended["steps"]) == (expected["updates"], expected["steps"]) == (5, 11)
    assert same(ended["shadow"], expected["shadow"])


@pytest.mark.slow
def test_a_run_that_averages_late_resumes_exactly(runs: Runs, evaluated: Evaluated) -> None:
    """Stopped before the start, at it, and after it; evaluate.py reads each of these checkpoints."""
    words = ["--optim.ema", "{decay: 0.9, start: 4step, every: 2}", "--progress.epoch_val", "1step"]
    uncut = runs.train(*words, name="uncut")
    plain = runs.train("--progress.epoch_val", "1step", name="plain")
    first, second = (metrics(folder, "val") for folder in (uncut, plain))
    assert [one["values"] == two["values"] for one, two in zip(first, second, strict=True)] == [True] * 4 + [False] * 6
    for stop in ("3", "4", "5", "7"):
        name = f"cut{stop}"
        cut = runs.train(*words, "--progress.max_steps", stop, name=name)
        state = load(cut)
        assert same(averaged_state_dict(state["model"], state), state["model"]) == (int(stop) <= 4)
        value = evaluated(cut / "checkpoints" / "latest.pt", "--split", "val")["values"]["loss"]
        assert value == pytest.approx(metrics(cut, "val")[-1]["values"]["loss"])
        runs.train(*words, "--resume", str(cut), name=name)
        assert same(load(cut)["ema"], load(uncut)["ema"])
        assert [row["values"] for row in metrics(cut, "val")] == [row["values"] for row in first]


def test_a_run_with_an_average_resumes_exactly(runs: Runs) -> None:
    """Cut twice within one epoch; the average is saved and continued with all else."""
    uncut, resumed = same_after_cut(runs, "plain", *AVERAGED, at=(3, 2, 1))
    assert same(load(uncut)["ema"], load(resumed)["ema"])


def test_other_programs_use_the_average(runs: Runs, evaluated: Evaluated) -> None:
    """evaluate.py measures what validation did."""
    folder = runs.train("--progress.epoch_eval", "1", "--optim.lr", "0.05", *AVERAGED)
    assert evaluated(folder / "checkpoints" / "latest.pt")["values"] == metrics(folder, "eval")[-1]["values"]


def test_models_with_state_of_other_kinds(runs: Runs) -> None:
    """Extra state: a resumed run has the average of the uncut one."""
    resumed_is_uncut(runs, "--model", MODEL.format("Extra"), *AVERAGED)
