"""docs/optim.md and docs/parts/optimizers.md do what they say."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.config import resolve
from common.optim import OptimConfig
from tests.conftest import CONFIG, PROJECT, Runs, load
from tests.parts.optimizers.test_optimizers import MATRICES
from tests.small import Plain
from custom.config import Config

GUIDE = "".join((PROJECT / "docs" / page).read_text() for page in ("optim.md", "parts/optimizers.md"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)


NAMES: dict[str, Any] = {"nn": nn, "torch": torch, "Tensor": Tensor}
[HEAD] = [text for text in blocks("python") if "class Head" in text]
exec(HEAD, NAMES)


class Mixed(Plain):
    """Its last layer is the guide's; it checks the formats that it computes in."""

    def __init__(self, own: bool, expected: list[str]) -> None:
        super().__init__()
        self.expected = expected
        if own:
            self.layers[3] = NAMES["Head"](16, 10)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.layers[:3](image)
        logits: Tensor = self.layers[3](hidden)
        assert [str(hidden.dtype), str(logits.dtype)] == [f"torch.{name}" for name in self.expected]
        return logits


@pytest.mark.parametrize(
    ("mode", "own", "expected"),
    [
        ("bf16", "false", "[bfloat16, bfloat16]"),
        ("bf16", "true", "[bfloat16, float32]"),
        ("fp32", "true", "[float32, float32]"),
        ("fp64", "true", "[float64, float64]"),
    ],
)
def test_a_part_in_32_bits(runs: Runs, mode: str, own: str, expected: str) -> None:
    """The guide's three lines, in each number format, with a gradient that reaches what lies below."""
    model = f"{{type: {__name__}.Mixed, own: {own}, expected: {expected}}}"
    folder = runs.train("--model", model, "--precision.mode", mode, "--progress.epoch", "1")
    moments = load(folder)["optimizer"]["state"]
    assert all(state["exp_avg_sq"].any() for state in moments.values())


def test_the_preset_of_muon_is_the_one_that_is_tried() -> None:
    """Trained, cut and resumed in tests/parts/optimizers."""
    assert f"groups: {MATRICES}\n" in GUIDE


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_example_is_a_valid_config(tmp_path: Path, text: str) -> None:
    """Its keys exist, and the values fit."""
    (tmp_path / "config.yaml").write_text(text.replace("$BASE: default.yaml", f"$BASE: {CONFIG}"))
    assert resolve(Config, [tmp_path / "config.yaml"]).config.optim != OptimConfig()
