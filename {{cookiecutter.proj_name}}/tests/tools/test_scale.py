"""--dist.simulate: what each of many ranks gets and holds, without them."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from common.checkpoint.file import write_checkpoint
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


class Stream:
    """Digits that can only be read in order, by every reader."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.digits = Digits(data_dir, mode)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.digits[index] for index in range(40))


def note(trainer: Any) -> None:
    """A plugin that writes down what this rank reads and holds: numbers of samples, bytes."""
    file = trainer.paths.root.parent / f"rank{trainer.rank.rank}.json"
    found: dict[str, Any] = {
        "train": [],
        "split": [],
        "random": len(trainer.state.state_dict(trainer.at, {})["random"]),
    }

    def after_step() -> None:
        for batch, size in zip(trainer.step.batches, trainer.step.global_batch.sizes, strict=True):
            found["train"] += batch["index"][:size].tolist()
        memory = simulate.size_of([each.grad for each in trainer.task.parameters()])
        found["gradients"], found["optimizer state"] = memory, simulate.size_of(trainer.optimizer.state_dict())
        found["weights"] = simulate.size_of(list(trainer.task.parameters()))
        file.write_text(json.dumps(found))

    def add(self: Evaluator, seen: Any, batch: Any, *more: Any) -> Any:
        if found["train"]:  # not before training, where a batch of each set is tried
            found["split"] += batch["index"].tolist()
            file.write_text(json.dumps(found))
        return original(self, seen, batch, *more)

    original, Evaluator._add = Evaluator._add, add  # type: ignore[method-assign, assignment]
    trainer.monitor.after_step.append(after_step)


def simulated(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> dict[str, Any]:
    """Simulate a rank. Returns the samples of all ranks by the name of their data, the memory, and the checkpoint."""
    found: dict[str, Any] = {}

    def count(name: str, wanted: np.ndarray, shares: Iterable[Sequence[int]]) -> simulate.Shares:
        found[name] = [list(map(int, each)) for each in shares]
        return counted(name, wanted, found[name])

    def noted(name: str, original: Any) -> Any:
        return lambda *given: found.setdefault(name, original(*given))

    counted = simulate.count_shares
    monkeypatch.setattr(simulate, "count_shares", count)
    for name in ("measure_step", "measure_checkpoint"):
        monkeypatch.setattr(simulate, name, noted(name, getattr(simulate, name)))
    assert train.main(words) == 0
    return found


def agrees(runs: Runs, monkeypatch: pytest.MonkeyPatch, world: int, *more: str) -> None:
    """Train and evaluate on `world` real ranks, simulate each of them, and compare."""
    words = runs.words(*WORDS, *more)
    several(runs, world, [*words, "--plugins", f"[{ME}.note]"], setup=None)
    size = (runs.root / "run" / "checkpoints" / "latest.pt").stat().st_size
    for rank in range(world):
        real = json.loads((runs.root / f"rank{rank}.json").read_text())
        told = simulated(monkeypatch, [*words, "--dist.simulate", str(world), "--dist.rank", str(rank)])
        assert real["train"] == told["train"][rank]
        assert real["split"] == told["val"][rank] + told["eval"][rank]
        assert {name: told["measure_step"][name] for name in ("weights", "gradients", "optimizer state")} == {
            name: real[name] for name in ("weights", "gradients", "optimizer state")
        }
        assert told["measure_checkpoint"][0] == pytest.approx(size, rel=0.03)
        assert real["random"] == (world if rank == 0 else 0)  # gathered where the file is written, and only there
        monkeypatch.undo()


def test_two_real_ranks(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples in an epoch and in evaluations, in their order; the bytes of weights, gradients and moments; the file."""
    agrees(runs, monkeypatch, 2)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--loader.drop_last", "true"], ["--dist.strategy", "fsdp"]])
def test_three_real_ranks(runs: Runs, monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    agrees(runs, monkeypatch, 3, *more)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1000, 64_001, 129_999])
def test_every_sample_is_on_one_of_a_thousand_ranks(size: int, drop_last: bool) -> None:
    """In training, shares of a step differ by one sample at most; in evaluation, by one batch."""
    order = EpochOrder({"type": "shuffle"}, range(size), 7)
    options = {"batch_size": 1 if size == 1000 else 8, "accumulate": 1 if size == 1000 else 2}
    plan = EpochPlan(order, world_size=1000, drop_last=drop_last, **options)
    used = size - size % plan.samples_per_step if drop_last else size
    shares = list(plan.shares(Position()))
    assert len(shares) == 1000
    assert sorted(chain.from_iterable(shares)) == sorted(order(0)[:used].tolist())
    last = [len(each) for each in plan.shares(Position(sample=(plan.steps_per_epoch - 1) * plan.samples_per_step))]
    assert max(last) - min(last) <= 1
    batches = list(evaluation_shares(size, 10, 1000))
    assert sorted(chain.from_iterable(batches)) == list(range(size))
    assert max(map(len, batches)) - min(map(len, batches)) <= 10


def test_a_lost_and_a_repeated_sample_are_found() -> None:
    wanted = np.arange(6)
    assert simulate.count_shares("train", wanted, [[0, 1, 2], [3, 4, 5]]).wrong == ""
    assert simulate.count_shares("train", wanted, [[0, 1, 2], [3, 5]]).wrong == "train: sample 4 is read 0 times, not 1"
    assert "sample 2 is read 2 times" in simulate.count_shares("val", wanted, [[0, 1, 2], [2, 3, 4, 5]]).wrong


@pytest.mark.parametrize("more", [[], pytest.param(["--dist.strategy", "fsdp"], marks=pytest.mark.slow)])
def test_rank_731_of_a_thousand(runs: Runs, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    """What it prints; no folder is made, no group is left, and an earlier run stays as it was."""
    earlier = runs.root / "run" / "config.yaml"
    earlier.parent.mkdir()
    earlier.write_text("mine")
    words = ["--debug.max_samples", "0", "--dist.random_seed", "null", *more]
    assert train.main(runs.words(*words, "--dist.simulate", "1000", "--dist.rank", "731")) == 0
    shown = capsys.readouterr().out
    assert "rank 731 of 1,000, simulated on cpu; no run was started" in shown
    assert [line.split() for line in shown.splitlines() if line.startswith("  val ")] == [
        ["val", "300", "0", "256", "0"]
    ]
    assert "every sample exactly once over all 1,000 ranks" in shown
    assert "32,000 samples: 32 x 1 accumulated x 1,000 ranks; steps per epoch: 1" in shown
    assert "note: val: 998 ranks have no batch: use a smaller eval_batch_size" in shown
    assert ("weights have too few rows for 1,000 ranks" in shown) == bool(more)
    assert [path for path in runs.root.rglob("*") if path.is_file()] == [earlier] and earlier.read_text() == "mine"
    assert not dist.is_initialized()


def test_wrong_shares_end_with_a_code(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.data.plan.evaluation_keys", lambda *given: [(0, [0])])
    assert runs.fail("--dist.simulate", "4") == 1


MISTAKES = {
    "no such rank": (["--dist.simulate", "3", "--dist.rank", "3"], "the ranks of --dist.simulate 3 are 0 to 2"),
    "no ranks": (["--dist.simulate", "0"], "dist.simulate = 0 (command line: --dist.simulate 0) must be greater"),
    "no number of ranks": (["--dist.rank", "3"], "rank needs simulate"),
    "processes": (["--dist.simulate", "3", "--dist.processes", "3"], "leave dist.processes out"),
    "a GPU": (["--dist.simulate", "3", "--gpu_ids", "99"], "gpu_ids: 99"),
    "a stream": (["--dist.simulate", "3", "--dataset.train", f"{{type: {ME}.Stream}}"], "has no method share"),
    "no step": (["--dist.simulate", "9", "--loader.drop_last", "true"], "an epoch has no optimizer step: 160 samples"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(error_of: ErrorOf, mistake: str) -> None:
    words, text = MISTAKES[mistake]
    assert text in error_of(*words)


def test_under_a_launcher_and_in_an_evaluation(
    error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch, runs: Runs, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.pt"
    write_checkpoint({}, weights)
    words = ["--config", "tests/base.yaml", "--model_pt", str(weights), "--dist.simulate", "3"]
    assert "only train.py can simulate ranks" in error_of(*words, program="evaluate")
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setitem(os.environ, name, value)
    assert "torchrun started this process as one of 2" in error_of("--dist.simulate", "3")
