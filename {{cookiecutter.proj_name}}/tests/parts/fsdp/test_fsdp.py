"""Models that are shared out among processes: they train as whole ones do, and so do their checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint.file import read_checkpoint
from tests.conftest import Runs, metrics, same
from tests.ranks import several
from tests.resume import words

FSDP = ["--dist.strategy", "fsdp"]
BLOCKS = ["--prepare.fsdp.blocks", "[layers.*]"]


# Everything that has a state of its own or looks at all weights at once, at each of a few steps.
BUSY = [
    "--optim.clip_gradients", "0.05", "--progress.epoch_eval", "1", "--debug.debug_mode", "true",
]  # fmt: skip
PLAIN = ["--model", "{type: tests.small.Plain}"]


def whole(folder: Path, name: str = "latest") -> dict[str, Any]:
    """Return a checkpoint of a run, without what differs between any two runs."""
    state = read_checkpoint(folder / "checkpoints" / f"{name}.pt")
    return {key: part for key, part in state.items() if key not in ("about", "fingerprint", "random")}


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()


def assert_near(first: Any, second: Any, where: str = "") -> None:
    """Two nested states are equal but for rounding in 64 bits."""
    if isinstance(first, torch.Tensor):
        torch.testing.assert_close(second, first, rtol=1e-7, atol=1e-9, msg=lambda text: f"{where}: {text}")
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key, value in first.items():
            assert_near(value, second[key], f"{where}.{key}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), where
        for index, value in enumerate(first):
            assert_near(value, second[index], f"{where}[{index}]")
    else:
        assert first == (pytest.approx(second) if isinstance(first, float) else second), where


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_it_trains_as_a_whole_model_does(runs: Runs, world: int) -> None:
    """In 64 bits, the same weights, moments and measurements as one process, to 1e-7.

    Clipped by their norm, accumulated in windows whose last leaves some ranks with fewer micro-batches (and
    the evaluation with fewer batches); with gradients logged, and weights that do not divide by the ranks.
    """
    size = {2: "6", 3: "4"}[world]
    common = [*PLAIN, *BUSY, "--precision.mode", "fp64", "--debug.max_samples", "149", "--optim.accumulate", "3"]
    common += ["--dataset.val", "{type: tests.samples.Digits, eval_batch_size: 50}"]
    one = runs.train(*common, "--batch_size", "12", name="one")
    several(runs, world, runs.words(*common, *FSDP, "--batch_size", size, name="several"))
    assert_near(whole(one), whole(runs.root / "several"))
    for event in ("val", "eval"):
        first, second = ([entry["values"] for entry in metrics(runs.root / name, event)] for name in ("one", "several"))
        assert_near(first, second)


@pytest.mark.slow
def test_it_trains_as_ddp_does(runs: Runs) -> None:
    """With batch norm, each rank's own, and rank 0's statistics in evaluation and checkpoint."""
    common = [*BUSY, "--precision.mode", "fp64", "--batch_size", "16", "--model.dropout", "0.2"]
    several(runs, 2, runs.words(*common, name="ddp"))
    several(runs, 2, runs.words(*common, *FSDP, "--prepare.fsdp.blocks", "[features.*]", name="fsdp"))
    assert_near(whole(runs.root / "ddp"), whole(runs.root / "fsdp"))
    assert "fsdp: model sharded, 3 blocks and the rest" in log(runs.root / "fsdp")


def test_one_process_keeps_its_weights(runs: Runs) -> None:
    """The same config runs on one process, as if it said ddp."""
    runs.train(*PLAIN, *FSDP, name="fsdp")
    runs.train(*PLAIN, name="ddp")
    assert same(whole(runs.root / "fsdp"), whole(runs.root / "ddp"))


RESUMED = ["--model", "{$REPLACE: true, type: tests.small.Tower, batch: true}", *BLOCKS, "--batch_size", "11"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_cut_and_resumed(runs: Runs, world: int) -> None:
    """Bit for bit the run that was never cut: dropout, batch norm, AdamW, uneven windows."""

    def argv(name: str, *more: str) -> list[str]:
        return runs.words(*words("plain", *RESUMED, *FSDP, *more), name=name)

    several(runs, world, argv("uncut"))
    several(runs, world, argv("cut"), at=4)
    several(runs, world, argv("cut", "--resume", "auto"))
    assert "this resume is bit-exact" in log(runs.root / "cut")
    for name in ("latest", "best"):
        assert same(whole(runs.root / "uncut", name), whole(runs.root / "cut", name)), name
    first, second = (
        [{key: value for key, value in entry.items() if key != "time"} for entry in metrics(runs.root / name, event)]
        for name, event in (("uncut", "val"), ("cut", "val"))
    )
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "strategy"), [(2, 1, "fsdp"), (1, 2, "fsdp"), (2, 3, "fsdp"), (2, 2, "ddp")]
)
def test_another_number_of_ranks(runs: Runs, before: int, after: int, strategy: str) -> None:
    """Every sample once, the same weights but for rounding; one process reads and writes whole files."""

    def go(world: int, name: str, *more: str) -> None:
        common = [*PLAIN, "--precision.mode", "fp64", "--progress.epoch_val", "-1"]
        argv = runs.words(*common, *more, "--batch_size", str(24 // world), name=name)
        several(runs, world, argv)

    go(before, "uncut", *FSDP)
    go(before, "cut", *FSDP, "--progress.epoch", "1")
    go(after, "cut", "--dist.strategy", strategy, "--resume", "auto")
    changed = "model sharded, 0 blocks -> whole" if before == after else f"ranks {before} -> {after}"
    assert f"sample-exact, not bit-exact ({changed}" in log(runs.root / "cut")
    assert_near(whole(runs.root / "uncut"), whole(runs.root / "cut"))


@pytest.fixture
def sharded(runs: Runs) -> Callable[..., Path]:
    """A run of two ranks that saves a numbered checkpoint at every step, and its checkpoint folder."""

    def train(*more: str) -> Path:
        steps = ["--progress.epoch_save_checkpoint", "1step", "--progress.epoch_val", "-1", "--checkpoint.keep", "2"]
        argv = runs.words(*PLAIN, *FSDP, *steps, "--batch_size", "16", *more)
        several(runs, 2, argv)
        return runs.root / "run" / "checkpoints"

    return train


@pytest.mark.slow
def test_one_ordinary_file(runs: Runs, sharded: Callable[..., Path], evaluated: Callable[..., Any]) -> None:
    """Loaded by plain torch, evaluated, started from; a damaged one is passed over."""
    latest = sharded() / "latest.pt"
    state = torch.load(latest, weights_only=True)
    assert {type(value) for value in state["model"].values()} == {torch.Tensor}
    assert state["model"]["layers.1.weight"].shape == (16, 64)
    values = evaluated(latest, "--split", "val")["values"]
    init = ["--init_from.path", str(latest), "--optim.lr", "1e-30", "--progress.max_steps", "1"]
    tuned = runs.train(*PLAIN, *init, name="tuned")
    assert metrics(tuned, "val")[-1]["values"]["loss"] == pytest.approx(values["loss"])
    step = state["position"]["step"]
    latest.unlink()  # the other names of the file stay whole
    latest.write_bytes(b"half")
    sharded("--resume", "auto", "--progress.epoch", "3")
    message = log(runs.root / "run")
    assert "trying the one before it" in message
    assert f"step_{step:08d}.pt, step {step}" in message
