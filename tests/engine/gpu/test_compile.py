"""Compiled models and CUDA graphs on a device."""

import os

import pytest

from engine.gpu.conftest import Device, assert_near

pytestmark = pytest.mark.slow
# Inductor compiles C++ for a CPU, which takes half a minute a test; there, a backend that only traces stands in.
BACKEND = os.environ.get("GPU_TESTS_BACKEND")
# Not Adam, whose steps are as long for gradients that are rounding alone.
SGD = ["--optim.optim_type", "SGD", "--optim.lr", "0.1"]
LAYERS = [
    "--model", "{$REPLACE: true, type: engine.gpu.parts.Layers, depth: 3, width: 16}", "--progress.epoch", "3", *SGD,
]  # fmt: skip


def compiled(device: Device, mode: str) -> list[str]:
    backend = BACKEND or ("inductor" if device.is_gpu else "aot_eager")
    return ["--prepare.compile", f"{{enabled: true, backend: {backend}, mode: {mode}, fullgraph: true}}"]


@pytest.mark.gpu("compile")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_trains_as_without(device: Device, precision: str) -> None:
    """One graph without a break; the same losses, but for rounding; in 32 bits the same weights."""
    words = [*LAYERS, "--precision.mode", precision]
    first = device.train(*words, name="eager")
    second = device.train(*words, *compiled(device, "default"), name="compiled")
    assert "compiled at the first step: Layers" in second.log
    assert second.notes["graphs"] > 0
    assert second.notes["graph breaks"] == 0
    assert second.losses == pytest.approx(first.losses, rel=1e-3 if precision == "fp32" else 5e-2)
    if precision == "fp32":
        device.record("difference", assert_near(first, second, 1e-3))


@pytest.mark.gpu("cuda graphs")
@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_graphs_are_replayed(device: Device, accumulate: str) -> None:
    """reduce-overhead: graphs are recorded, and losses that a step keeps are not overwritten by the next one.

    Losses are kept until the next log line, micro-batches are accumulated, the last step of an epoch is smaller, and
    validations lie in between.
    """
    words = [*LAYERS, "--batch_size", "24", "--optim.accumulate", accumulate, "--progress.log_every", "4"]
    first = device.train(*words, name="eager")
    second = device.train(*words, *compiled(device, "reduce-overhead"), name="graphs")
    device.record("notes", {key: value for key, value in second.notes.items() if "graph" in key})
    if device.is_gpu:
        assert second.notes["cuda graphs"] > 0
        assert second.notes["cuda graphs skipped"] == 0
    assert second.losses == pytest.approx(first.losses, rel=1e-3)
    device.record("difference", assert_near(first, second, 1e-3))
