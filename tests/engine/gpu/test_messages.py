"""What a person reads when a device runs out of memory, or when a kernel stops at a value that it cannot use."""

import pytest

from engine.gpu.conftest import Device

pytestmark = pytest.mark.slow
WRONG = ["--dataset.train", "{$REPLACE: true, type: engine.gpu.parts.WrongLabel}"]


@pytest.mark.gpu("out of memory")
def test_out_of_memory(device: Device) -> None:
    """What was asked for, on which device, and what to try; with the shapes of the batch."""
    run = device.fail("--model", "{$REPLACE: true, type: engine.gpu.parts.Greedy}")
    device.record("read", run.text[-3000:])
    assert ("CUDA out of memory. Tried to allocate" if device.is_gpu else "can't allocate memory") in run.text
    assert "in training, a smaller batch_size (raise optim.accumulate)" in run.text
    assert "image float32" in run.text


@pytest.mark.gpu("assert")
@pytest.mark.parametrize("blocking", ["1", "0"], ids=["blocking", "asynchronous"])
def test_a_wrong_label(device: Device, blocking: str) -> None:
    """The sample and its label are named; if the GPU reports it late, the cause and how to find the place."""
    run = device.fail(*WRONG, "--batch_size", "160", CUDA_LAUNCH_BLOCKING=blocking)
    device.record("read", run.text[-3000:])
    named = "label 12 in sample 77 of dataset.train: the model gives 10 classes" in run.text
    hint = "label >= the number of classes? Rerun with CUDA_LAUNCH_BLOCKING=1" in run.text
    device.record("named", named)
    assert named or (device.is_gpu and blocking == "0" and hint), run.text
