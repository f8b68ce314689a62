"""Mixed precision in both formats, with the scaler, on a device."""

import pytest
import torch
from torch import nn

from common.optim.precision import Precision
from proofs.gpu.conftest import NET, Device

pytestmark = pytest.mark.gpu("amp")


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_it_learns_as_in_32_bits(device: Device, mode: str) -> None:
    """The loss of a validation falls, and ends near that of 32 bits; the weights and the average stay in 32 bits."""
    words = [*NET, "--progress.epoch", "4", "--optim.lr", "0.01", "--optim.clip_gradients", "1"]
    wide = device.train(*words, name="fp32")
    narrow = device.train(*words, "--optim.ema.decay", "0.5", "--precision.mode", mode, name=mode)
    device.record("losses fp32", wide.losses)
    device.record(f"losses {mode}", narrow.losses)
    assert wide.losses[-1] < 0.7 * wide.losses[0]
    assert narrow.losses[-1] < 0.7 * narrow.losses[0]
    plain = device.train(*words, "--precision.mode", mode, name="plain")
    assert plain.losses[-1] == pytest.approx(wide.losses[-1], rel=0.1)
    assert plain.losses != wide.losses, "it computes in 32 bits"
    state = narrow.state
    tensors = [*state["model"].values(), *state["ema"]["shadow"].values()]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}
    assert ("scale" in state["precision"]) == (mode == "fp16")


def test_a_step_beyond_the_range_is_skipped(device: Device) -> None:
    """fp16: gradients that are not finite change nothing but the scale, and the next step is taken."""
    precision = Precision("fp16", device.kind)
    weight = nn.Parameter(torch.ones(4, device=device.torch))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    assert precision.scaler is not None
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
