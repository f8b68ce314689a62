"""A model from a string: what it builds, and what it says about mistakes."""

import pytest
import torch
from torch import nn

from common.base.errors import UserError
from examples.model_from_string.model import Residual, StringModel
from tests.conftest import Runs, metrics
from tests.examples.runs import trained


def kinds(model: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in model.layers]


def test_layers_fit_each_other() -> None:
    model = StringModel("c16k5s2 n g p2 2(c16 n r c16) r a2 d10 f l20 n r l10", [3, 32, 24])
    assert model(torch.randn(5, 3, 32, 24)).shape == (5, 10)
    assert kinds(model)[:4] == ["Conv2d", "BatchNorm2d", "GELU", "MaxPool2d"]
    assert kinds(model)[4:6] == ["Residual", "Residual"] and "BatchNorm1d" in kinds(model)
    first, second = (layer for layer in model.layers if isinstance(layer, Residual))
    assert not torch.equal(first.layers[0].weight, second.layers[0].weight)
    assert model.layers[-1].in_features == 20


def test_building_draws_no_more_than_the_weights() -> None:
    """The same weights as those of layers made by hand: trying shapes draws nothing."""
    torch.manual_seed(0)
    ours = StringModel("c4 d10 n f l3", [1, 4, 4])
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(64, 3))
    assert torch.equal(ours.layers[0].weight, theirs[0].weight)
    assert torch.equal(ours.layers[-1].weight, theirs[1].weight)
    assert ours.layers[2].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("layers", "word", "reason"),
    [
        ("c16 r q3", "q3", "a layer is one of c n r g p a d f l"),
        ("c16 c0", "c0", "a layer is one of"),
        ("c16 16c", "16c", "a layer is one of"),
        ("r c", "c", "c takes channels, k, s"),
        ("c16z3", "c16z3", "c takes channels, k, s"),
        ("r5", "r5", "r takes no number"),
        ("c16 (r", "(", "this bracket is not closed"),
        ("c16 r)", ")", "no bracket was opened"),
        ("c16 2(c8 r)", "2(", "the output (8, 8, 8) cannot be added to the input (16, 8, 8)"),
        ("c16 p9 l10", "p9", "does not fit the shape (16, 8, 8)"),
        ("c16 l10", "l10", "put f before it"),
    ],
)
def test_a_mistake_is_shown_in_its_place(layers: str, word: str, reason: str) -> None:
    with pytest.raises(UserError) as error:
        StringModel(layers, [1, 8, 8])
    what, text, mark = str(error.value).splitlines()
    assert what.startswith(f"model.layers: {word}: ") and reason in what
    assert text == f"  {layers}" and mark.index("^") - 2 == layers.index(word)


def test_nothing_at_all() -> None:
    with pytest.raises(UserError, match="there is no layer"):
        StringModel(" ", [1, 8, 8])


def test_another_model_by_command_line(runs: Runs) -> None:
    folder = trained(runs, "model_from_string/config", "--model.layers", "f l32 r l10", "--progress.epoch", "2")
    assert metrics(folder, "val")[-1]["values"]["Accuracy"] > 0.5
