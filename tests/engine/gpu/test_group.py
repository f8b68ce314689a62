"""Exchanges between devices: NCCL in a group of one process, which every machine with a GPU has, and of all devices."""

import pytest

from engine.gpu.conftest import Device, assert_near

DEEP = ["--model", "{$REPLACE: true, type: tests.small.Deep}", "--optim.clip_gradients", "0.1"]
pytestmark = pytest.mark.slow
BLOCKS = ["--dist.strategy", "fsdp", "--prepare.fsdp.blocks", "[layers.*]"]
GROUPS = pytest.mark.parametrize("group", ["one", "all"])


def batches(device: Device, group: str) -> tuple[list[str], list[str]]:
    """Return the batch size for one process, and for each of a group: together the same."""
    count = device.processes(group)
    return ["--batch_size", str(16 * count)], ["--batch_size", "16"]


@pytest.mark.gpu("nccl")
@GROUPS
def test_replicas_train_as_one_process_does(device: Device, group: str) -> None:
    """DDP, sums of metrics, agreements; in 64 bits the same weights and the same validation."""
    alone, each = batches(device, group)
    words = [*DEEP, "--precision.mode", "fp64", "--optim.accumulate", "2"]
    first = device.train(*words, *alone, name="alone")
    second = device.train(*words, *each, name="group", group=group)
    assert second.notes["backend"] == ("nccl" if device.is_gpu else "gloo")
    assert second.notes["processes"] == device.processes(group)
    assert first.notes["backend"] == ""
    device.record("difference", assert_near(first, second, 1e-9))
    assert second.losses == pytest.approx(first.losses, rel=1e-9)


@pytest.mark.gpu("nccl")
def test_all_end_when_one_fails(device: Device) -> None:
    """Nobody waits for an exchange in which one process does not take part."""
    words = ["--model", "{$REPLACE: true, type: tests.small.Breaks}"]
    run = device.end(*words, group="all", variables={"BREAKS": "raise 1 train 5"})
    assert 0 not in run.codes
    assert "rank 1 failed" in run.text
    assert "a mistake in the model" in run.text


@pytest.mark.gpu("nccl")
def test_a_hang_names_the_process(device: Device) -> None:
    """One process stops in the model; the report names it."""
    words = ["--model", "{$REPLACE: true, type: tests.small.Breaks}", "--dist.timeout", "15"]
    run = device.end(*words, group="all", variables={"BREAKS": "hang 1 train 5"})
    assert 0 not in run.codes
    device.record("read", run.text[-3000:])
    device.record("files", sorted(file.name for file in run.folder.iterdir()))  # nccl_rank<k> is of torch's watchdog
    assert "rank 1 failed" in run.text


@pytest.mark.gpu("fsdp")
@GROUPS
def test_shards_train_as_one_process_does(device: Device, group: str) -> None:
    """The weights are gathered block by block; the checkpoint is an ordinary one."""
    alone, each = batches(device, group)
    words = [*DEEP, "--precision.mode", "fp64"]
    first = device.train(*words, *alone, name="alone")
    second = device.train(*words, *each, *BLOCKS, name="shards", group=group)
    assert "fsdp: model sharded, 3 blocks" in second.log
    device.record("difference", assert_near(first, second, 1e-9))


@pytest.mark.gpu("fsdp")
@pytest.mark.parametrize(("group", "offload"), [("one", "false"), ("one", "true"), ("all", "true")])
def test_shards_in_16_bits(device: Device, group: str, offload: str) -> None:
    """Weights gathered in bf16, also from the memory of the host; stopped and resumed."""
    _, each = batches(device, group)
    words = [*DEEP, *each, *BLOCKS, "--precision.mode", "bf16", "--prepare.fsdp.cpu_offload", offload]
    run = device.train(*words, "--progress.epoch", "1", group=group)
    run = device.train(*words, "--progress.epoch", "3", "--resume", "auto", group=group)
    assert "fsdp: model sharded, 3 blocks" in run.log
    assert len(run.losses) == 3
    assert run.losses[-1] < run.losses[0]
