"""The deterministic mode, numbers on memory, and torch.accelerator."""

import pytest
import torch

from common.distributed.seed import random_state, random_state_unchanged, set_random_state
from engine.gpu.conftest import NET, STRICT, Device
from tests.conftest import metrics, same

LARGE = [
    "--optim.optim_type", "SGD", "--progress.log_every", "1",
    "--progress.epoch", "null", "--progress.max_steps", "3", "--progress.epoch_val", "-1", "--debug.max_samples", "0",
    "--dataset.train", "{$REPLACE: true, type: engine.gpu.parts.Many}",
]  # fmt: skip


@pytest.mark.gpu("deterministic")
@pytest.mark.slow
def test_two_runs_are_one(device: Device) -> None:
    """Strict: every bit of weights, moments and random states."""
    words = [*NET, *STRICT, "--precision.mode", "bf16"]
    states = [device.train(*words, name=name).state for name in ("first", "second")]
    for key in ("model", "optimizer", "random"):
        assert same(states[0][key], states[1][key]), key


@pytest.mark.gpu("deterministic")
@pytest.mark.slow
def test_what_is_not_deterministic_is_refused(device: Device) -> None:
    """Strict: an operation without a deterministic version ends the run, by its name; warn: it is a warning."""
    words = ["--model", "{$REPLACE: true, type: engine.gpu.parts.Undetermined}"]
    run = device.fail(*words, *STRICT)
    device.record("read", run.text[-3000:])
    assert "put_" in run.text
    assert "does not have a deterministic implementation" in run.text
    warned = device.train(*words, "--dist.deterministic", "warn", name="warned")
    assert "does not have a deterministic implementation" in warned.text


@pytest.mark.gpu("deterministic")
@pytest.mark.slow
def test_the_shipped_model(device: Device) -> None:
    """Strict, with the model of configs/default.yaml: the same bits."""
    first, second = (device.train(*STRICT, name=name) for name in ("first", "second"))
    assert same(first.state["model"], second.state["model"])


@pytest.mark.gpu("memory")
@pytest.mark.slow
def test_peaks(device: Device) -> None:
    """Log lines and metrics.jsonl show what torch counts; accumulation and recomputation lower it on a GPU."""
    # On a GPU so large that neither the weights nor the workspaces of libraries are most of it.
    size = "depth: 8, width: 512" if device.is_gpu else "depth: 2, width: 32"
    model = ["--model", f"{{$REPLACE: true, type: engine.gpu.parts.Layers, {size}}}"]
    peaks = {}
    for name, words in {
        "whole": ["--batch_size", "4096"],
        "accumulated": ["--batch_size", "512", "--optim.accumulate", "8"],
        "recomputed": ["--batch_size", "4096", "--prepare.activation_checkpointing", "[layers.*]"],
    }.items():
        run = device.train(*LARGE, *model, *words, name=name)
        assert " mem " in run.log.replace("|", " ")
        shown = [entry["values"]["memory_bytes"] for entry in metrics(run.folder, "speed")]
        peaks[name] = max(shown)
        assert peaks[name] > 0
        if device.is_gpu:
            assert run.notes["peaks"][0] == run.notes["peaks"][1] <= run.notes["peaks"][2]
    device.record("bytes", peaks)
    if device.is_gpu:
        assert peaks["accumulated"] < 0.5 * peaks["whole"]
        assert peaks["recomputed"] < 0.8 * peaks["whole"]


@pytest.mark.slow
@pytest.mark.gpu("accelerator")
def test_it_is_what_torch_finds(device: Device) -> None:
    """torch.accelerator names the device that a run used, and the run set it as the current one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert (found is not None and found.type == "cuda") == device.is_gpu
    run = device.train(*NET, "--progress.epoch", "1")
    assert f"on {device.kind}" in run.log
    if device.is_gpu:
        assert torch.accelerator.device_count() == torch.cuda.device_count() == device.count
        assert run.notes["accelerator"] == ["cuda", 0]


@pytest.mark.gpu("accelerator")
def test_random_states_of_the_device(device: Device) -> None:
    """What is drawn on the device is drawn again from a saved state, and is not moved by what is drawn in between."""
    state = random_state(device.torch)
    first = torch.rand(5, device=device.torch)
    with random_state_unchanged(device.torch):
        torch.rand(7, device=device.torch)
    second = torch.rand(5, device=device.torch)
    set_random_state(state, device.torch)
    assert torch.equal(torch.rand(5, device=device.torch), first)
    assert torch.equal(torch.rand(5, device=device.torch), second)
