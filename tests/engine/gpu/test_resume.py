"""Exact resume on a device."""

import pytest

from engine.gpu.conftest import NET, STRICT, Device
from tests.conftest import same

pytestmark = [pytest.mark.slow, pytest.mark.gpu("resume")]
MORTAL = [
    "--loss", "{$REPLACE: true, ce: {type: tests.small.Mortal}}", "--best.metric", "loss",
    "--progress.epoch_save_latest", "1step", "--checkpoint.background", "false",
]  # fmt: skip


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ("", []),
        ("", ["--precision.mode", "fp16", "--optim.clip_gradients", "1", "--num_workers", "2"]),
        ("one", ["--precision.mode", "bf16", "--optim.accumulate", "2", "--prepare.channels_last", "true"]),
    ],
    ids=["fp32", "fp16, clipped, workers", "a group, bf16, accumulated, channels last"],
)
def test_cut_and_resumed_to_the_bit(device: Device, group: str, words: list[str]) -> None:
    """Killed inside an epoch, with dropout: weights, moments, scaler, random states as without the cut."""
    words = [*NET, *STRICT, *MORTAL, *words]
    uncut = device.train(*words, name="uncut", group=group)
    killed = device.end(*words, name="cut", group=group, variables={"MORTAL_AT": "9"})
    assert killed.codes == [9], killed.text
    assert not (killed.folder / "notes.json").exists()
    cut = device.train(*words, "--resume", "auto", name="cut", group=group)
    assert "bit-exact" in cut.log
    assert "not bit-exact" not in cut.log
    assert cut.losses == uncut.losses
    assert same(part(cut.state), part(uncut.state))


def test_what_is_promised_without_strict(device: Device) -> None:
    """On a GPU the log does not promise the same bits unless the run is deterministic."""
    device.train(*NET, "--progress.epoch", "1")
    run = device.train(*NET, "--progress.epoch", "2", "--resume", "auto")
    assert ("not bit-exact (a GPU without dist.deterministic strict" in run.log) == device.is_gpu


def part(state: dict[str, object]) -> dict[str, object]:
    """Return a checkpoint without what differs between any two runs."""
    return {key: value for key, value in state.items() if key not in ("about", "fingerprint")}
