"""Ways in which processes share the work: several copies of a sharded model, and what gradients are exchanged as."""

import re
from typing import Any

import pytest
import torch

from common.distributed.collectives import local
from common.trainer import Trainer
from tests.conftest import PROJECT, ErrorOf, Runs, same
from tests.parts.fsdp.test_fsdp import BLOCKS, BUSY, FSDP, PLAIN, assert_near, log, whole
from tests.ranks import refused, several
from tests.resume import words

HSDP = [*FSDP, "--dist.shard_size", "2"]


def parts(trainer: Trainer) -> None:
    """A plug-in that notes how many numbers of the model this process holds."""
    held = sum(local(parameter).numel() for parameter in trainer.parameters)
    (trainer.paths.root / f"parts{trainer.rank.rank}").write_text(str(held))


@pytest.mark.slow
def test_two_copies_of_two_shards(runs: Runs) -> None:
    """Four processes: in 64 bits, the weights, moments, averages and measurements of FSDP over all, and of DDP.

    Clipped by norm, averaged, accumulated; a process holds half the model, and a resume with one copy goes on alike.
    """
    common = [*PLAIN, *BUSY, "--precision.mode", "fp64", "--debug.max_samples", "149", "--optim.accumulate", "3"]
    common += ["--batch_size", "4", "--plugins"]
    plugin = ["[engine.model.test_processes:parts]"]
    several(runs, 4, runs.words(*common, *plugin, *HSDP, *BLOCKS[:1], "[layers.1]", name="copies"))
    several(runs, 4, runs.words(*common, *plugin, *FSDP, name="shards"))
    several(runs, 4, runs.words(*common, "[]", name="ddp"))
    assert_near(whole(runs.root / "shards"), whole(runs.root / "copies"))
    assert_near(whole(runs.root / "ddp"), whole(runs.root / "copies"))
    held = {name: int((runs.root / name / "parts0").read_text()) for name in ("copies", "shards")}
    numbers = sum(value.numel() for value in whole(runs.root / "copies")["model"].values())
    assert held["copies"] == pytest.approx(numbers / 2, rel=0.02)
    assert held["shards"] == pytest.approx(numbers / 4, rel=0.1)
    assert "fsdp: model sharded, 1 blocks, 2 copies" in log(runs.root / "copies")


@pytest.mark.slow
def test_copies_are_resumed(runs: Runs) -> None:
    """To the bit with as many copies; sample-exact with others."""

    def argv(name: str, *more: str) -> list[str]:
        return runs.words(*words("plain", *PLAIN, *more), "--batch_size", "8", name=name)

    several(runs, 4, argv("uncut", *HSDP))
    several(runs, 4, argv("cut", *HSDP), at=4)
    several(runs, 4, argv("cut", *HSDP, "--resume", "auto"))
    assert "this resume is bit-exact" in log(runs.root / "cut")
    assert same(whole(runs.root / "uncut"), whole(runs.root / "cut"))
    several(runs, 4, argv("other", *HSDP), at=4)
    several(runs, 4, argv("other", *FSDP, "--resume", "auto"))
    assert "model sharded, 0 blocks, 2 copies -> sharded, 0 blocks" in log(runs.root / "other")


@pytest.mark.slow
def test_groups_that_do_not_divide(runs: Runs) -> None:
    message = refused(runs, 3, runs.words(*PLAIN, *HSDP))
    assert "dist.shard_size: 3 processes cannot be divided into groups of 2" in message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--dist.shard_size", "2"], "needs dist.strategy fsdp; ddp: each process holds it all"),
        (["--dist.shard_size", "1"], "dist.shard_size"),
        ([*FSDP, "--prepare.channels_last", "true"], "dist.strategy fsdp needs contiguous weights"),
    ],
)
def test_what_does_not_go_together(error_of: ErrorOf, given: list[str], message: str) -> None:
    assert message in error_of(*given)


def short_gradients(trainer: Trainer) -> None:
    """The plugin of docs/optim.md."""
    page = (PROJECT / "docs" / "optim.md").read_text()
    (block,) = re.findall(r"```python\n(# custom/short_gradients.py\n.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    names["attach"](trainer)


@pytest.mark.slow
def test_gradients_in_sixteen_bits(runs: Runs) -> None:
    """One step of SGD with lr 1 changes each weight by gradients rounded to bf16."""
    step = [*PLAIN, "--optim.optim_type", "SGD", "--batch_size", "16"]
    step += ["--progress.epoch", "null", "--progress.max_steps", "1", "--optim.lr"]
    weights = {}
    for name, plugins in (("whole", "[]"), ("bf16", "[engine.model.test_processes:short_gradients]")):
        several(runs, 2, runs.words(*step, "1", "--plugins", plugins, name=name))
        weights[name] = whole(runs.root / name)["model"]
    start = whole(runs.train(*step, "1e-30", name="start"))["model"]
    for name, first in start.items():
        exact, rounded = (first - weights[kind][name] for kind in ("whole", "bf16"))
        assert not torch.equal(exact, rounded)
        torch.testing.assert_close(rounded, exact, rtol=2e-2, atol=1e-4)
