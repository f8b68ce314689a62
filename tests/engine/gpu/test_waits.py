"""A training step on a GPU lets the host go on: CUDA itself refuses every call that waits."""

import pytest

from engine.conftest import AVERAGED
from engine.gpu.conftest import NET, Device

pytestmark = [pytest.mark.slow, pytest.mark.gpu("batches")]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_waits_for_nothing(device: Device, precision: str) -> None:
    """With the defaults and an average, clipping and accumulation; batches come from workers, in pinned memory."""
    words = ["--optim.accumulate", "2", *AVERAGED, "--optim.clip_gradients", "1"]
    words += ["--num_workers", "2", "--batch_size", "16", "--precision.mode", precision]
    run = device.train(*NET, *words, variables={"REFUSE_WAITS": "1"})
    assert "from here on, no step may wait" in run.text
