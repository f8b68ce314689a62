"""Pinned and prefetched batches on a device."""

import json

import pytest
import torch

from common.data.loader import LoaderConfig, make_loader, to_device
from common.data.workers import end_workers, read
from engine.gpu.conftest import NET, STRICT, Device
from tests.conftest import same

pytestmark = pytest.mark.gpu("batches")


def test_batches_of_workers_are_pinned(device: Device) -> None:
    """By default for a GPU, in any nesting; and what arrives there are their values."""
    samples = [{"image": torch.full((3, 5), float(number)), "more": [torch.tensor(number)]} for number in range(8)]
    loader = make_loader(samples, LoaderConfig(prefetch=3), 2, 0, device.torch, batch_size=2)
    values = []
    for batch in read(loader):
        tensors = [tensor for sample in batch for tensor in (sample["image"], *sample["more"])]
        assert {tensor.is_pinned() for tensor in tensors} == {device.is_gpu}
        moved = to_device(batch, device.torch)
        assert {sample["image"].device.type for sample in moved} == {device.kind}
        values += [float(sample["image"].max()) for sample in moved]
    end_workers(loader)
    assert values == list(range(8))


def test_a_copy_is_not_waited_for(device: Device) -> None:
    """The host goes on while the copy waits for a busy GPU, and the values are right; a CPU copies nothing."""
    batch = {"image": torch.arange(1 << 20, dtype=torch.float32)}
    if not device.is_gpu:
        assert to_device(batch, device.torch)["image"] is batch["image"]
        return
    pinned = {"image": batch["image"].pin_memory()}
    to_device(pinned, device.torch)  # the first copy starts the device
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    moved, event = to_device(pinned, device.torch), torch.cuda.Event()
    event.record()
    assert not event.query(), "the host has waited for the copy"
    assert torch.equal(moved["image"].cpu(), batch["image"])


@pytest.mark.slow
def test_a_run_does_not_depend_on_them(device: Device) -> None:
    """Workers and prefetched batches change no bit of the weights."""
    words = [*NET, *STRICT, "--loader.prefetch", "4"]
    without = device.train(*words, "--num_workers", "0", name="without")
    ahead = device.train(*words, "--num_workers", "2", name="ahead")
    assert same(without.state["model"], ahead.state["model"])
    for run in (without, ahead):
        speed = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        device.record(f"speed {run.folder.name}", [entry["values"] for entry in speed if entry["event"] == "speed"])
