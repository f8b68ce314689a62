"""Averages of frozen parts, and checksums of tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.checkpoint.checksum import checksum
from parts.ema.average import Ema
from tests.conftest import Runs, load
from tests.resume import cut, differing, final, words

HERE = "engine.checkpoint.test_frozen"
WIDTH = 30_000


def outcome(folder: Path) -> dict[str, Any]:
    """As `final`, but for the digests of the weights, which are of what a file holds."""
    run = final(folder)
    for row in run["measured"]:
        row.pop("weights", None)
    return run


class Adapted(nn.Module):
    """A large base of 1.9 million numbers with a table, and a small trained part, as with LoRA."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.down = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(65, 10)
        self.register_buffer("table", torch.randn(5_000))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(torch.cat([image.flatten(1), self.down(self.base(image)) + self.table[0]], dim=1))


MODEL = ["--model", f"{{type: {HERE}.Adapted}}", "--optim.ema.decay", "0.9"]


def test_averages_of_frozen_parts_in_older_files(runs: Runs, monkeypatch: pytest.MonkeyPatch, evaluated: Any) -> None:
    """They load, and continue as they did."""
    more = ["--model.width", "50", *MODEL, "--prepare.freeze", "[base.*]"]
    with monkeypatch.context() as patch:
        patch.setattr(Ema, "follow", lambda self, model, _=None: self._add(model.state_dict()))  # as it was until then
        uncut = outcome(runs.train(*words("plain", *more), name="uncut"))
        cut(runs, "plain", 8, *more)
    assert "base.1.weight" in load(runs.root / "cut")["ema"]["shadow"]
    folder = runs.train(*words("plain", *more, "--resume", "auto"), name="cut")
    assert differing(uncut, outcome(folder)) == []
    evaluated(folder / "checkpoints" / "best.pt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_checksum_sees_each_number_and_its_place(dtype: torch.dtype) -> None:
    values = torch.arange(200_001).remainder(97).to(dtype)
    changed = values.clone()
    changed[3] = changed[0]
    others = [values.roll(1), values[:-1], values.reshape(-1, 1), changed]
    assert len({checksum(each) for each in (values, *others)}) == 5


def test_a_checksum_is_the_same_in_any_precision_and_layout() -> None:
    """But not after two signs have changed."""
    values = torch.randn(4, 6, 5, 5)
    assert checksum(values) == checksum(values.double()) == checksum(values.to(memory_format=torch.channels_last))
    assert checksum(torch.ones(2)) != checksum(-torch.ones(2))
    assert checksum(torch.zeros(0)) != checksum(torch.zeros(1)) != checksum(torch.zeros(()))
