"""Whatever is late on a device must not change a bit: not against the CPU, nor against a device that is never late."""

import json
import shutil
import signal

import pytest

from engine.accelerator.conftest import OF_THE_DEVICE, Accelerator, differing, leaves, read
from engine.conftest import AVERAGED, PICTURES

# Each step is saved in the background while the next ones change what is saved.
SAVES = ("--progress.epoch_save_checkpoint", "2step", "--checkpoint.keep", "0")
ALL_AT_ONCE = (
    *SAVES, *AVERAGED, "--num_workers", "1", "--batch_size", "16", "--optim.accumulate", "2",
    "--optim.clip_gradients", "1.0", "--model.dropout", "0.2",
)  # fmt: skip
OVERFLOWS = ("--precision.mode", "fp16", "--loss.CrossEntropyLoss.weight", "3000")


def test_late_work_has_the_bits_of_the_cpu(accelerator: Accelerator) -> None:
    """Weights, states, validations: all that a CPU's run has; but dropout, which is drawn on the device."""
    words = (*SAVES, *AVERAGED, "--model.dropout", "0")
    on_cpu, on_device = accelerator.train(*words, name="cpu", on="-1"), accelerator.train(*words, name="device")
    assert "rank 0 of 1 on emu:0" in (on_device / "train.log").read_text()
    assert differing(on_cpu, on_device, OF_THE_DEVICE) == []


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(ALL_AT_ONCE, id="everything"),
        pytest.param((*SAVES, "--precision.mode", "bf16"), id="bf16", marks=pytest.mark.full),
        pytest.param((*SAVES, *OVERFLOWS), id="fp16"),
    ],
)
def test_late_work_has_the_bits_of_work_at_once(accelerator: Accelerator, words: tuple[str, ...]) -> None:
    """Every file holds the moment of its save."""
    eager = accelerator.train(*words, name="eager", mode="eager")
    lazy = accelerator.train(*words, name="lazy")
    assert len(list((lazy / "checkpoints").glob("step_*.pt"))) == 5
    assert differing(eager, lazy) == []
    if "fp16" in words:
        assert "skipped" in (lazy / "train.log").read_text()


def test_a_save_without_a_copy_has_the_same_bits(accelerator: Accelerator) -> None:
    copied = accelerator.train(*SAVES, name="copied")
    at_once = accelerator.train(*SAVES, "--checkpoint.background", "false", name="at_once")
    assert differing(copied, at_once) == []


def test_killed_and_resumed(accelerator: Accelerator) -> None:
    """What the device has drawn is part of the state: dropout continues as if nothing had happened."""
    words = ("--model.dropout", "0.5", "--progress.epoch_save_latest", "3step", *AVERAGED)
    uncut = accelerator.train(*words, name="uncut")
    plugin = ("--plugins", "[engine.accelerator.parts.kill]")
    line = accelerator.runs.words("--gpu_ids", "0", *PICTURES, *words, *plugin, name="cut")
    assert accelerator.call("train.py", *line, KILL_AFTER="8").returncode == -signal.SIGKILL
    assert read(accelerator.runs.root / "cut" / "checkpoints" / "latest.pt")["position"]["step"] == 6
    resumed = accelerator.train(*words, "--resume", "auto", name="cut")
    one, other = (read(folder / "checkpoints" / "latest.pt") for folder in (uncut, resumed))
    assert any(name.endswith(".emu") for name, _ in leaves(one["random"]))
    for folder in (uncut, resumed):  # what was measured before the kill is not measured again
        (folder / "metrics.jsonl").write_text("")
    assert differing(uncut, resumed) == [], other["position"]


def test_an_evaluation_is_the_same_on_any_device(accelerator: Accelerator) -> None:
    """On the CPU, on either device, and on both."""
    model = accelerator.train() / "checkpoints" / "best.pt"
    found = []
    for on in ("-1", "0", "1", "0,1"):
        folder = model.parent.parent / "eval"
        shutil.rmtree(folder, ignore_errors=True)
        accelerator.good("evaluate.py", "--model_pt", str(model), "--gpu_ids", on)
        found.append(json.loads((folder / "best" / "metrics.json").read_text()))
    assert [each["values"] for each in found[1:]] == [found[0]["values"]] * 3


@pytest.mark.full
def test_a_group_of_two_devices(accelerator: Accelerator) -> None:
    """DDP: late or not, with accumulation; and all ranks have come to the same weights."""
    words = ("--optim.accumulate", "2", "--batch_size", "8", *AVERAGED, *SAVES)
    eager = accelerator.train(*words, on="0,1", name="eager", mode="eager")
    lazy = accelerator.train(*words, on="0,1", name="lazy")
    assert "of 2 on emu:0" in (lazy / "train.log").read_text()
    assert differing(eager, lazy) == []


def test_a_sharded_model(accelerator: Accelerator) -> None:
    """FSDP gathers and frees weights in streams of its own."""
    words = ("--dist.strategy", "fsdp", *SAVES)
    eager = accelerator.train(*words, on="0,1", name="eager", mode="eager")
    lazy = accelerator.train(*words, on="0,1", name="lazy")
    assert "sharded" in (lazy / "train.log").read_text()
    assert differing(eager, lazy) == []


def test_two_devices_train_what_one_does(accelerator: Accelerator) -> None:
    """dist.reduction fixed, with dropout: the same bits on any number of devices."""
    words = ("--dist.reduction", "fixed", "--dist.deterministic", "strict", "--optim.accumulate", "2")
    one = accelerator.train(*words, name="one")
    two = accelerator.train(*words, on="0,1", name="two")
    assert differing(one, two, (".random.",)) == []
