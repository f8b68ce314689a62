"""What processes tell each other; in a single process each exchange does nothing, so no caller has to ask."""

import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.distributed import (
    Rank,
    barrier,
    from_main,
    gather_objects,
    gather_to_main,
    max_over_ranks,
    sum_over_ranks,
)
from common.trainer import Trainer
from tests.conftest import Runs
from tests.ranks import several

HERE = "engine.distributed.test_exchanges"


def check_exchanges(trainer: Trainer) -> None:
    """A plug-in that tries all of them."""
    rank = trainer.rank
    everyone = list(range(rank.world_size))
    assert gather_objects({"me": rank.rank}, rank) == [{"me": number} for number in everyone]
    assert gather_to_main(rank.rank, rank) == (everyone if rank.is_main else [])
    assert from_main(f"rank {rank.rank}", rank) == "rank 0"
    assert max_over_ranks(rank.rank, rank) == everyone[-1]
    assert sum_over_ranks(torch.tensor([rank.rank, 1.0]), rank).tolist() == [sum(everyone), len(everyone)]
    barrier(rank)


def check_alike_at_the_start(trainer: Trainer) -> None:
    """A plug-in that compares what all ranks must have in common."""
    rank = trainer.rank
    first = next(iter(trainer.task.model.parameters())).detach().tolist()
    seed: Any = trainer.state.fingerprint["seed"]
    for other in gather_objects((first, seed, str(trainer.paths.root)), rank):
        assert other == (first, seed, str(trainer.paths.root))
    # The streams of the loop (dropout) are each rank's own.
    drawn = gather_objects(torch.rand(3).tolist(), rank)
    assert len({tuple(numbers) for numbers in drawn}) == rank.world_size


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_exchanges(runs: Runs, world: int) -> None:
    """The same calls, the same results, alone and with others."""
    words = ["--plugins", f"[{HERE}:check_exchanges]", "--progress.max_steps", "1"]
    if world == 1:
        runs.train(*words)
    else:
        several(runs, world, runs.words(*words))


@pytest.mark.slow
def test_alike_at_the_start(runs: Runs) -> None:
    """The seed, the first weights and the run's folder are the same on every rank."""
    words = ["--plugins", f"[{HERE}:check_alike_at_the_start]"]
    several(runs, 2, runs.words(*words, "--progress.max_steps", "1"))
    assert [path.name for path in runs.root.iterdir() if path.is_dir()] == ["run"]
    record = json.loads((runs.root / "run" / "run.json").read_text())["attempts"][0]
    assert (record["world_size"], record["seed"]) == (2, 42)


@pytest.mark.slow
def test_ranks_end_with_their_test(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends a test, a Ctrl-C say, it leaves no process behind."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    monkeypatch.setattr("tests.ranks.time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupt))
    with pytest.raises(KeyboardInterrupt):
        several(runs, 2, runs.words("--progress.epoch", "100000"))
    assert set(multiprocessing.active_children()) <= before


def test_one_process_exchanges_nothing() -> None:
    """Nothing needs to be started for rank 0 of 1."""
    rank = replace(Rank(), control=None)
    assert rank.is_main and rank.is_single_process
    assert gather_objects(Path("x"), rank) == gather_to_main(Path("x"), rank) == [Path("x")]
    assert from_main(3, rank) == max_over_ranks(3, rank) == 3
