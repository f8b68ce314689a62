"""Models that are shared out among processes: they train as whole ones do, and so do their checkpoints."""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.checkpoint import read_checkpoint
from common.trainer import Trainer
from tests.conftest import Runs, metrics, same
from tests.ranks import refused, several
from tools import checkpoint as tool
from tests.resume import words
from custom.datasets.digits_dataset import DigitsDataset

FSDP = ["--dist.strategy", "fsdp"]
BLOCKS = ["--prepare.fsdp.blocks", "[layers.*]"]
# Everything that has a state of its own or looks at all weights at once, at each of a few steps.
BUSY = [
    "--optim.ema.decay", "0.9", "--optim.clip_gradients", "0.05", "--progress.iter_save_progress", "1",
    "--progress.epoch_eval", "1", "--debug.debug_mode", "true",
]  # fmt: skip
TOWER = ["--model", "{type: tests.parts.Tower}", *BLOCKS]
PLAIN = ["--model", "{type: tests.parts.Plain}"]


def whole(folder: Path, name: str = "latest") -> dict[str, Any]:
    """A checkpoint of a run, without what differs between any two runs."""
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


@pytest.mark.parametrize("world", [2, 3])
def test_it_trains_as_a_whole_model_does(runs: Runs, world: int) -> None:
    """R-36: in 64 bits, the same weights, moments, averages and measurements as one process, to 1e-7.

    Clipped by their norm, averaged, accumulated in windows whose last leaves some ranks with fewer micro-batches (and
    the evaluation with fewer batches); with pictures, gradients logged, and weights that do not divide by the ranks.
    """
    size = {2: "6", 3: "4"}[world]
    common = [*PLAIN, *BUSY, "--precision.mode", "fp64", "--debug.max_samples", "149", "--optim.accumulate", "3"]
    common += ["--dataset.val", "{type: DigitsDataset, eval_batch_size: 50}"]
    one = runs.train(*common, "--batch_size", "12", name="one")
    several(runs, world, runs.words(*common, *FSDP, "--batch_size", size, name="several"))
    assert_near(whole(one), whole(runs.root / "several"))
    for event in ("val", "eval"):
        first, second = ([entry["values"] for entry in metrics(runs.root / name, event)] for name in ("one", "several"))
        assert_near(first, second)


@pytest.mark.slow
def test_it_trains_as_ddp_does(runs: Runs) -> None:
    """R-36: with batch norm, each rank's own, and rank 0's statistics in evaluation and checkpoint."""
    common = [*BUSY, "--precision.mode", "fp64", "--batch_size", "16", "--model.dropout", "0.2"]
    several(runs, 2, runs.words(*common, name="ddp"))
    several(runs, 2, runs.words(*common, *FSDP, "--prepare.fsdp.blocks", "[features.*]", name="fsdp"))
    assert_near(whole(runs.root / "ddp"), whole(runs.root / "fsdp"))
    assert "fsdp: model sharded, 3 blocks and the rest" in log(runs.root / "fsdp")


@pytest.mark.slow
def test_a_rank_without_samples(runs: Runs) -> None:
    """Two samples for three ranks, in training and evaluation: the third takes part for nothing."""
    common = [*PLAIN, *BUSY, "--precision.mode", "fp64", "--debug.max_samples", "2"]
    one = runs.train(*common, name="one")
    several(runs, 3, runs.words(*common, *FSDP, name="several"))
    assert_near(whole(one), whole(runs.root / "several"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("both", "here", "tolerance"),
    [
        (["--precision.mode", "fp16"], ["--prepare.fsdp.reshard_after_forward", "false"], 2e-2),
        (["--precision.mode", "bf16"], ["--prepare.fsdp.cpu_offload", "true"], 2e-2),
        (["--prepare.freeze", "[stem.*, layers.0.*]"], ["--prepare.activation_checkpointing", "[layers.*]"], 1e-5),
        (["--optim.clip_type", "value"], ["--prepare.compile", "{enabled: true, backend: aot_eager}"], 1e-5),
        (
            ["--optim.optim_type", "SGD", "--optim.args", "{momentum: 0.9}"],
            ["--dist.broadcast_buffers", "false"],
            1e-5,
        ),
    ],
    ids=["fp16", "bf16, offload", "frozen, recomputed", "compiled", "momentum"],
)
def test_with_everything_else(runs: Runs, both: list[str], here: list[str], tolerance: float) -> None:
    """R-58, R-36, MM-82: what else a config asks for goes with it; loss and weights are those of a run with DDP."""
    common = [*TOWER, "--model.depth", "2", "--batch_size", "16", "--optim.lr", "0.01", *BUSY[:-2], *both]
    several(runs, 2, runs.words(*common, *FSDP, *here, name="fsdp"))
    several(runs, 2, runs.words(*common, name="ddp"))
    losses = [metrics(runs.root / name, "val")[-1]["values"]["loss"] for name in ("fsdp", "ddp")]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    if tolerance < 1e-4:  # all in 32 bits
        ours, theirs = (whole(runs.root / name)["model"] for name in ("fsdp", "ddp"))
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)


def formats(trainer: Trainer) -> None:
    """A plug-in that notes in what gradients are exchanged, and what the model gives."""
    seen: set[str] = set()
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    scatter = getattr(dist, name)  # what FSDP calls; it has another name since PyTorch 2.13

    def note(text: str) -> None:
        seen.add(text)
        (trainer.paths.root / f"formats{trainer.rank.rank}").write_text("\n".join(sorted(seen)))

    def noted(*arguments: Any, **options: Any) -> Any:
        note(f"exchanged {options['input'].dtype}")
        return scatter(*arguments, **options)

    setattr(dist, name, noted)
    trainer.task.model.register_forward_hook(lambda model, inputs, output: note(f"output {output.dtype}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "exchanged", "output"),
    [
        ([], "float32", "float32"),
        (["--prepare.fsdp.reduce_dtype", "bf16"], "bfloat16", "float32"),
        (["--prepare.fsdp.output_dtype", "bf16"], "float32", "bfloat16"),
        (["--prepare.fsdp.param_dtype", "bf16"], "float32", "float32"),
        (["--prepare.fsdp", "{param_dtype: bf16, reduce_dtype: bf16, output_dtype: bf16}"], "bfloat16", "bfloat16"),
    ],
    ids=["own", "reduce", "output", "narrow", "all"],
)
def test_number_formats(runs: Runs, words: list[str], exchanged: str, output: str) -> None:
    """R-36, R-54: each option of FSDP's policy arrives; the weights that are kept have 32 bits all the same."""
    more = ["--plugins", "[tests.model.test_fsdp:formats]", "--progress.max_steps", "2"]
    several(runs, 2, runs.words(*PLAIN, *FSDP, *words, *more))
    found = [(runs.root / "run" / f"formats{rank}").read_text().splitlines() for rank in (0, 1)]
    assert found == [[f"exchanged torch.{exchanged}", f"output torch.{output}"]] * 2
    assert {value.dtype for value in whole(runs.root / "run")["model"].values()} == {torch.float32}


@pytest.mark.slow
def test_scaling_needs_the_device(runs: Runs) -> None:
    """R-36: fp16 with the weights in host memory is refused, with what to do."""
    told = refused(runs, 2, runs.words(*PLAIN, *FSDP, "--prepare.fsdp.cpu_offload", "true", "--precision.mode", "fp16"))
    assert "prepare.fsdp.cpu_offload: the loss scaling of precision.mode fp16 needs the device; use bf16" in told


class Uneven:
    """Digits that can only be read in order: 20 on the first rank, 14 on others."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.digits = DigitsDataset(data_dir, mode)

    def share(self, reader: int, readers: int) -> None:
        """It reads by rank as it is."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.digits[index] for index in range(20 if os.environ["RANK"] == "0" else 14))


@pytest.mark.slow
def test_ranks_that_read_unlike_amounts(runs: Runs) -> None:
    """R-63: windows of 3 micro-batches of 4, the second with 2 on the first rank and 1 on the other; as DDP does it."""
    common = ["--dataset.train", "{type: tests.model.test_fsdp.Uneven}", *PLAIN, "--batch_size", "4"]
    common += ["--optim.accumulate", "3", "--precision.mode", "fp64"]
    several(runs, 2, runs.words(*common, *FSDP, name="fsdp"))
    several(runs, 2, runs.words(*common, name="ddp"))
    state = whole(runs.root / "fsdp")
    assert state["position"]["step"] == 4
    assert_near(whole(runs.root / "ddp"), state)


@pytest.mark.slow
def test_narrow_weights(runs: Runs) -> None:
    """precision.mode bf16 computes in bf16 weights and without autocast; batch norm keeps to autocast."""
    several(runs, 2, runs.words("--model", "{type: tests.parts.Narrow}", *FSDP, "--precision.mode", "bf16"))
    state = whole(runs.root / "run")
    assert {value.dtype for value in state["model"].values()} == {torch.float32}
    several(runs, 2, runs.words(*FSDP, "--precision.mode", "bf16"))
    assert "the model has batch norm, so weights stay 32 bits, under autocast" in log(runs.root / "run")
    told = refused(runs, 2, runs.words(*FSDP, "--prepare.fsdp.param_dtype", "bf16"))
    assert "running statistics of batch norm need 32 bits" in told


@pytest.mark.slow
def test_an_optimizer_that_needs_the_whole_gradient(runs: Runs) -> None:
    """LBFGS is refused, with what to do."""
    told = refused(runs, 2, runs.words(*PLAIN, *FSDP, "--optim.optim_type", "LBFGS"))
    assert "LBFGS needs the whole gradient in one place: use dist.strategy ddp" in told


def test_one_process_keeps_its_weights(runs: Runs) -> None:
    """The same config runs on one process, as if it said ddp."""
    runs.train(*PLAIN, *FSDP, name="fsdp")
    runs.train(*PLAIN, name="ddp")
    assert "dist.strategy fsdp has no effect on a single process" in log(runs.root / "fsdp")
    assert same(whole(runs.root / "fsdp"), whole(runs.root / "ddp"))


# Checkpoints.

RESUMED = ["--model", "{$REPLACE: true, type: tests.parts.Tower, batch: true}", *BLOCKS, "--batch_size", "11"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_cut_and_resumed(runs: Runs, world: int) -> None:
    """R-33, D-39: bit for bit the run that was never cut: dropout, batch norm, AdamW, average, uneven windows."""

    def argv(name: str, *more: str) -> list[str]:
        return runs.words(*words("plain", *RESUMED, *FSDP, "--optim.ema.decay", "0.9", *more), name=name)

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
    """R-33, R-34: every sample once, the same weights but for rounding; one process reads and writes whole files."""

    def go(world: int, name: str, *more: str) -> None:
        common = [*PLAIN, "--precision.mode", "fp64", "--optim.ema.decay", "0.9", "--progress.epoch_val", "-1"]
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
        argv = runs.words(*PLAIN, *FSDP, *steps, "--batch_size", "16", "--optim.ema.decay", "0.9", *more)
        several(runs, 2, argv)
        return runs.root / "run" / "checkpoints"

    return train


def test_one_ordinary_file(
    runs: Runs, sharded: Callable[..., Path], evaluated: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """R-34, R-37, D-30: loaded by plain torch, looked into, evaluated, started from; a damaged one is passed over."""
    latest = sharded() / "latest.pt"
    state = torch.load(latest, weights_only=True)
    assert {type(value) for value in state["model"].values()} == {torch.Tensor}
    assert tool.main([str(latest)]) == 0
    assert "layers.1.weight  float32  (16, 64)" in capsys.readouterr().out
    values = evaluated(latest, "--split", "val")["values"]
    init = ["--init_from.path", str(latest), "--optim.lr", "1e-30", "--progress.max_steps", "1"]
    tuned = runs.train(*PLAIN, *init, name="tuned")
    assert metrics(tuned, "val")[-1]["values"]["loss"] == pytest.approx(values["loss"])
    step = state["position"]["step"]
    latest.unlink()  # the other names of the file stay whole
    latest.write_bytes(b"half")
    sharded("--resume", "auto", "--progress.epoch", "3")
    told = log(runs.root / "run")
    assert "trying the one before it" in told
    assert f"step_{step:08d}.pt, step {step}" in told


@pytest.mark.slow
def test_weights_of_a_sharded_run(runs: Runs, sharded: Callable[..., Path]) -> None:
    """R-34: start_epoch 0 takes the weights of another run, and nothing else."""
    latest = sharded() / "latest.pt"
    before = read_checkpoint(latest)
    weights = ["--resume", str(latest), "--progress.start_epoch", "0", "--name", "tuned"]
    sharded(*weights, "--optim.lr", "1e-30", "--progress.max_steps", "1")
    after = whole(runs.root / "tuned")
    assert after["position"]["step"] == 1
    assert same(after["model"], before["ema"]["shadow"])


def full_disk() -> None:
    """Files may not grow beyond 100 kB; a checkpoint has 230."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.slow
def test_a_full_disk(runs: Runs) -> None:
    """R-20: training goes on for a while, then all ranks end; nothing half-written is left."""
    steps = ["--progress.epoch_save_latest", "1step", "--progress.epoch_val", "-1", "--checkpoint.failures", "2"]
    argv = runs.words("--model", "{type: tests.parts.Plain, width: 256}", *FSDP, *steps)
    told = refused(runs, 2, argv, full_disk)
    assert "checkpoint not written: File too large" in told
    assert "no checkpoint could be written, 2 times in a row: File too large" in told
    assert list((runs.root / "run" / "checkpoints").iterdir()) == []


def own_state(trainer: Trainer) -> None:
    """A part of one's own that holds the weights themselves."""

    class Copy:
        def state_dict(self) -> dict[str, Any]:
            return {"weights": [*trainer.task.model.state_dict().values()]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    trainer.register_state("copy", Copy())


def test_state_of_ones_own(runs: Runs) -> None:
    """R-53, QQ-20: sharded tensors in it are found, and saved whole."""
    several(runs, 2, runs.words(*PLAIN, *FSDP, "--plugins", "[tests.model.test_fsdp:own_state]"))
    state = whole(runs.root / "run")
    assert same(state["user"]["copy"]["weights"], [*state["model"].values()])
