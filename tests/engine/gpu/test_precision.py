"""Mixed precision in both formats, with the scaler, on a device."""

import pytest
import torch
from torch import nn

from common.optim.precision import Precision
from engine.gpu.conftest import NET, Device

pytestmark = pytest.mark.gpu("amp")


@pytest.mark.slow
def test_it_learns_as_in_32_bits(device: Device) -> None:
    """The loss of a validation falls, and ends near that of 32 bits; the weights stay in 32 bits."""
    words = [*NET, "--progress.epoch", "4", "--optim.lr", "0.01", "--optim.clip_gradients", "1"]
    runs = {mode: device.train(*words, "--precision.mode", mode, name=mode) for mode in ("fp32", "bf16", "fp16")}
    losses = {mode: run.losses for mode, run in runs.items()}
    device.record("losses", losses)
    for mode, run in runs.items():
        assert losses[mode][-1] < 0.9 * losses[mode][0], mode
        assert losses[mode][-1] == pytest.approx(losses["fp32"][-1], rel=0.1), mode
        assert {value.dtype for value in run.state["model"].values() if value.is_floating_point()} == {torch.float32}
        assert ("scale" in run.state["precision"]) == (mode == "fp16")
    assert losses["bf16"] != losses["fp32"] != losses["fp16"], "it computes in 32 bits"


def test_a_step_beyond_the_range_is_skipped(device: Device) -> None:
    """fp16: gradients that are not finite change nothing but the scale, and the next step is taken."""
    precision = Precision("fp16", device.kind)
    weight = nn.Parameter(torch.ones(4, device=device.torch))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    assert precision.scaler.is_enabled()
    scale = precision.scaler.get_scale()
    for factor, taken in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        with precision.autocast():
            loss = nn.functional.linear(weight, torch.full((1, 4), 0.5, device=device.torch)).sum() * factor
        precision.scaler.scale(loss).backward()
        precision.scaler.unscale_(optimizer)
        assert precision.step(optimizer) is taken
        assert bool((weight == 1.0).all()) is not taken
        assert precision.scaler.get_scale() == scale / 2
