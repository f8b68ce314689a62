"""--dist.simulate: what each of many ranks gets and holds, without them."""

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from common.base.errors import UserError
from common.data.order import EpochOrder
from common.data.plan import EpochPlan, evaluation_shares
from common.evaluator import Evaluator
from common.progress import Position
import train
from cli import simulate
from tests.conftest import ErrorOf, Runs
from tests.ranks import several
from tests.samples import Digits

ME = __name__
DATA = {split: {"type": f"{ME}.Numbered"} for split in ("train", "val", "eval")}
WORDS = ["--dataset", json.dumps(DATA), "--debug.max_samples", "151", "--batch_size", "8", "--optim.accumulate", "2"]
WORDS += ["--progress.epoch", "1", "--progress.epoch_eval", "1", "--optim.ema.decay", "0.9"]


class Numbered(Digits):
    """Digits with their numbers."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(index)}


def note(trainer: Any) -> None:
    """A plugin that writes down what this rank reads and holds: numbers of samples, bytes."""
    file = trainer.paths.root.parent / f"rank{trainer.rank.rank}.json"
    facts: dict[str, Any] = {"train": [], "evaluated": []}
    facts["random"] = len(trainer.state.state_dict(trainer.at, {})["random"])

    def after_step() -> None:
        for batch, size in zip(trainer.step.batches, trainer.step.global_batch.sizes, strict=True):
            facts["train"] += batch["index"][:size].tolist()
        parameters = list(trainer.task.parameters())
        held = {"weights": parameters, "gradients": [parameter.grad for parameter in parameters]}
        held["optimizer state"] = trainer.optimizer.state_dict()
        facts["memory"] = {name: simulate.size_of(values) for name, values in held.items()}
        file.write_text(json.dumps(facts))

    def add(self: Evaluator, seen: Any, batch: Any, *more: Any) -> Any:
        if facts["train"]:  # not before training, where a batch of each set is tried
            facts["evaluated"] += batch["index"].tolist()
            file.write_text(json.dumps(facts))
        return original(self, seen, batch, *more)

    original: Any = Evaluator._add
    setattr(Evaluator, "_add", add)  # noqa: B010
    trainer.monitor.after_step.append(after_step)


def simulated(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> dict[str, Any]:
    """Simulate a rank. Returns the samples of all ranks by the name of their data, the memory, and the file's size."""
    facts: dict[str, Any] = {}

    def count(name: str, wanted: np.ndarray[Any, Any], shares: Iterable[Sequence[int]]) -> list[int]:
        facts[name] = [list(map(int, share)) for share in shares]
        return count_samples(name, wanted, facts[name])

    def noted(name: str, original: Any) -> Any:
        return lambda *given: facts.setdefault(name, original(*given))

    count_samples = simulate.count_samples
    with monkeypatch.context() as patch:
        patch.setattr(simulate, "count_samples", count)
        for name in ("measure_step", "measure_checkpoint"):
            patch.setattr(simulate, name, noted(name, getattr(simulate, name)))
        assert train.main(words) == 0
    return facts


def agrees(runs: Runs, monkeypatch: pytest.MonkeyPatch, world: int, *more: str) -> None:
    """Train and evaluate on `world` real ranks, simulate each of them, and compare."""
    words = runs.words(*WORDS, *more)
    several(runs, world, [*words, "--plugins", f"[{ME}.note]"], setup=None)
    size = (runs.root / "run" / "checkpoints" / "latest.pt").stat().st_size
    for rank in range(world):
        real = json.loads((runs.root / f"rank{rank}.json").read_text())
        told = simulated(monkeypatch, [*words, "--dist.simulate", str(world), "--dist.rank", str(rank)])
        assert real["train"] == told["train"][rank]
        assert real["evaluated"] == told["val"][rank] + told["eval"][rank]
        assert real["memory"].items() <= told["measure_step"].items()
        assert told["measure_checkpoint"] == pytest.approx(size, rel=0.03)
        assert real["random"] == (world if rank == 0 else 0)  # gathered where the file is written, and only there


def test_two_real_ranks(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples in an epoch and in evaluations, in their order; the bytes of weights, gradients and moments; the file."""
    agrees(runs, monkeypatch, 2)


@pytest.mark.slow
def test_three_real_ranks(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    agrees(runs, monkeypatch, 3)


@pytest.mark.parametrize("size", [1000, 64_001])
def test_every_sample_is_on_one_of_a_thousand_ranks(size: int) -> None:
    """In training, shares of a step differ by one sample at most; in evaluation, by one batch."""
    order = EpochOrder({"type": "shuffle"}, range(size), 7)
    plan = EpochPlan(order, batch_size=8, accumulate=2, world_size=1000)
    assert sorted(chain.from_iterable(plan.shares(Position()))) == list(range(size))
    last = [len(share) for share in plan.shares(Position(sample=(plan.steps_per_epoch - 1) * plan.samples_per_step))]
    assert len(last) == 1000 and max(last) - min(last) <= 1
    batches = list(evaluation_shares(size, 10, 1000))
    assert sorted(chain.from_iterable(batches)) == list(range(size))
    assert max(map(len, batches)) - min(map(len, batches)) <= 10


@pytest.mark.parametrize("shares", [[[0, 1, 2], [3, 5]], [[0, 1, 2], [2, 3, 4, 5]]])
def test_a_lost_and_a_repeated_sample_are_found(shares: list[list[int]]) -> None:
    assert simulate.count_samples("train", np.arange(6), [[0, 1, 2], [3, 4, 5]]) == [3, 3]
    with pytest.raises(UserError, match=r"train: sample [24] is not read exactly once over all ranks"):
        simulate.count_samples("train", np.arange(6), shares)


def test_rank_731_of_a_thousand(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints; no folder is made, no group is left, and an earlier run stays as it was."""
    earlier = runs.root / "run" / "config.yaml"
    earlier.parent.mkdir()
    earlier.write_text("mine")
    words = ["--debug.max_samples", "0", "--dist.simulate", "1000", "--dist.rank", "731"]
    assert train.main(runs.words(*words)) == 0
    shown = capsys.readouterr().out
    assert "rank 731 of 1,000, simulated on cpu; no run was started" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["val", "300", "0", "256", "0", "998"] in rows
    assert "every sample exactly once over all 1,000 ranks" in shown
    assert "32,000 samples: 32 x 1 accumulated x 1,000 ranks; steps per epoch: 1" in shown
    assert [path for path in runs.root.rglob("*") if path.is_file()] == [earlier] and earlier.read_text() == "mine"
    assert not dist.is_initialized()


def test_a_rank_that_does_not_exist(error_of: ErrorOf) -> None:
    assert "the ranks of --dist.simulate 3 are 0 to 2" in error_of("--dist.simulate", "3", "--dist.rank", "3")
