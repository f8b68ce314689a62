"""tools.export in the forms that need no further package; the template's tests have the others."""

import json
from pathlib import Path

import pytest
import torch

from common.base.errors import UserError
from tests.conftest import Runs, load
from tests.samples import Convolution
from tools import export


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run."""
    return Runs(tmp_path_factory.mktemp("runs")).train("--optim.lr", "0.05")


def test_an_exported_program_is_the_model(run: Path) -> None:
    """With the weights of the best checkpoint, for any number of samples; described as it is."""
    assert export.main(["--model_pt", str(run), "--to", "torch"]) == 0
    state, model, images = (
        load(run, "best"),
        Convolution(in_channels=1, classes=10, width=4).eval(),
        torch.rand(5, 1, 8, 8),
    )
    model.load_state_dict(state["model"])
    program = torch.export.load(run / "export" / "model.pt2").module()
    torch.testing.assert_close(program(images), model(images))
    about = json.loads((run / "export" / "model.pt2.json").read_text())
    assert about["inputs"]["image"] == {"shape": ["batch", 1, 8, 8], "dtype": "float32", "key": "image"}
    assert (about["step"], about["classes"]) == (state["position"]["step"], list("0123456789"))


def test_a_wrong_program_is_not_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with the model before it gets its name."""
    monkeypatch.setattr(export, "read", lambda *_: lambda inputs: {"output": torch.zeros(len(inputs["image"]), 10)})
    with pytest.raises(UserError, match="the program differs from the model by"):
        export.main(["--model_pt", str(run), "--to", "torch", "--out", str(run / "wrong" / "model.pt2")])
    assert list((run / "wrong").iterdir()) == []
