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

from common.checkpoint.file import read_checkpoint
from common.trainer import Trainer
from engine.conftest import PICTURES
from tests.conftest import Runs, metrics, same
from tests.parts.fsdp import test_fsdp as project
from tests.parts.fsdp.test_fsdp import BLOCKS, BUSY, FSDP, PLAIN, assert_near, log, whole
from tests.ranks import refused, several
from custom.datasets.digits_dataset import DigitsDataset

TOWER = ["--model", "{type: tests.small.Tower}", *BLOCKS]


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
    """What else a config asks for goes with it, pictures too; loss and weights are those of a run with DDP."""
    common = [*TOWER, "--model.depth", "2", "--batch_size", "16", "--optim.lr", "0.01", *BUSY[:-2], *PICTURES, *both]
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
        (["--prepare.fsdp.param_dtype", "bf16"], "float32", "float32"),
    ],
    ids=["own", "narrow"],
)
def test_number_formats(runs: Runs, words: list[str], exchanged: str, output: str) -> None:
    """Each option of FSDP's policy arrives; the weights that are kept have 32 bits all the same."""
    more = ["--plugins", "[engine.model.test_fsdp:formats]", "--progress.max_steps", "2"]
    several(runs, 2, runs.words(*PLAIN, *FSDP, *words, *more))
    found = [(runs.root / "run" / f"formats{rank}").read_text().splitlines() for rank in (0, 1)]
    assert found == [[f"exchanged torch.{exchanged}", f"output torch.{output}"]] * 2
    assert {value.dtype for value in whole(runs.root / "run")["model"].values()} == {torch.float32}


@pytest.mark.slow
def test_scaling_needs_the_device(runs: Runs) -> None:
    """fp16 with the weights in host memory is refused, with what to do."""
    message = refused(
        runs, 2, runs.words(*PLAIN, *FSDP, "--prepare.fsdp.cpu_offload", "true", "--precision.mode", "fp16")
    )
    assert "prepare.fsdp.cpu_offload: the loss scaling of precision.mode fp16 needs the device; use bf16" in message


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
    """Windows of 3 micro-batches of 4, the second with 2 on the first rank and 1 on the other; as DDP does it."""
    common = ["--dataset.train", "{type: engine.model.test_fsdp.Uneven}", *PLAIN, "--batch_size", "4"]
    common += ["--optim.accumulate", "3", "--precision.mode", "fp64"]
    several(runs, 2, runs.words(*common, *FSDP, name="fsdp"))
    several(runs, 2, runs.words(*common, name="ddp"))
    state = whole(runs.root / "fsdp")
    assert state["position"]["step"] == 4
    assert_near(whole(runs.root / "ddp"), state)


@pytest.mark.slow
def test_narrow_weights(runs: Runs) -> None:
    """precision.mode bf16 computes in bf16 weights and without autocast; batch norm keeps to autocast."""
    several(runs, 2, runs.words("--model", "{type: tests.small.Narrow}", *FSDP, "--precision.mode", "bf16"))
    state = whole(runs.root / "run")
    assert {value.dtype for value in state["model"].values()} == {torch.float32}
    several(runs, 2, runs.words(*FSDP, "--precision.mode", "bf16"))
    assert "the model has batch norm, so weights stay 32 bits, under autocast" in log(runs.root / "run")
    message = refused(runs, 2, runs.words(*FSDP, "--prepare.fsdp.param_dtype", "bf16"))
    assert "running statistics of batch norm need 32 bits" in message


@pytest.mark.slow
def test_an_optimizer_that_needs_the_whole_gradient(runs: Runs) -> None:
    """LBFGS is refused, with what to do."""
    message = refused(runs, 2, runs.words(*PLAIN, *FSDP, "--optim.optim_type", "LBFGS"))
    assert "LBFGS needs whole gradients: use dist.strategy ddp" in message
    assert "Traceback" not in message


sharded = project.sharded  # the fixture


@pytest.mark.slow
def test_weights_of_a_sharded_run(runs: Runs, sharded: Callable[..., Path]) -> None:
    """`init_from` takes the weights of another run, and nothing else."""
    latest = sharded() / "latest.pt"
    before = read_checkpoint(latest)
    weights = ["--init_from.path", str(latest), "--name", "tuned"]
    sharded(*weights, "--optim.lr", "1e-30", "--progress.max_steps", "1")
    after = whole(runs.root / "tuned")
    assert after["position"]["step"] == 1
    assert same(after["model"], before["model"])


def full_disk() -> None:
    """Files may not grow beyond 100 kB; a checkpoint has 230."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.slow
def test_a_full_disk(runs: Runs) -> None:
    """Training continues for a while, then all ranks end; nothing half-written is left."""
    steps = ["--progress.epoch_save_latest", "1step", "--progress.epoch_val", "-1", "--checkpoint.failures", "2"]
    argv = runs.words("--model", "{type: tests.small.Plain, width: 256}", *FSDP, *steps)
    message = refused(runs, 2, argv, full_disk)
    assert "checkpoint not written: [Errno 27] File too large" in message
    assert "saving a checkpoint failed 2 times in a row: [Errno 27] File too large" in message
    assert list((runs.root / "run" / "checkpoints").iterdir()) == []


def own_state(trainer: Trainer) -> None:
    """A part of one's own that holds the weights themselves."""

    class Copy:
        def state_dict(self) -> dict[str, Any]:
            return {"weights": [*trainer.task.model.state_dict().values()]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    trainer.state.register("copy", Copy())


@pytest.mark.slow
def test_state_of_ones_own(runs: Runs) -> None:
    """Sharded tensors in it are found, and saved whole."""
    several(runs, 2, runs.words(*PLAIN, *FSDP, "--plugins", "[engine.model.test_fsdp:own_state]"))
    state = whole(runs.root / "run")
    assert same(state["user"]["copy"]["weights"], [*state["model"].values()])
