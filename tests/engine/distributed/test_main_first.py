"""What one process prepares, and the others find."""

import os
import time
from pathlib import Path

import pytest

from common import distributed
from common.distributed import Rank
from common.trainer import Trainer
from tests.conftest import Runs
from tests.ranks import start_ranks

FAST = ["--model", "{type: tests.small.Plain}", "--progress.max_steps", "1", "--progress.epoch_val", "-1"]


def prepare(trainer: Trainer) -> None:
    """A plug-in: rank 0 makes a file, slowly; the others read it, each taking its time; all are done afterwards."""
    folder, number = Path(os.environ["PREPARED"]), trainer.rank.rank
    made = folder / "made"
    with distributed.main_first(trainer.rank):
        if os.environ.get("FAILS") == str(number):
            raise RuntimeError("cannot be prepared")
        if number == 0:
            assert not any(folder.iterdir()), "others were here first"
            time.sleep(7)
            made.touch()
        else:
            assert made.exists(), "rank 0 is not done"
            time.sleep(0.3 * number)
        (folder / f"done{number}").touch()
    assert sorted(path.name for path in folder.iterdir()) == ["done0", "done1", "done2", "made"]


@pytest.mark.slow
def test_rank_0_goes_first(runs: Runs) -> None:
    """The others wait, for longer than dist.timeout, and no process leaves before all have been through."""
    folder = runs.root / "prepared"
    folder.mkdir()
    words = [*FAST, "--plugins", "[engine.distributed.test_main_first:prepare]", "--dist.timeout", "5"]
    ended = start_ranks(runs.root, 3, runs.words(*words), environment={"PREPARED": str(folder)})
    assert ended.codes == [0, 0, 0], "\n".join(ended.texts)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_inside_ends_all(runs: Runs, rank: int) -> None:
    """The others do not wait for one that fails; its reason is shown."""
    folder = runs.root / "prepared"
    folder.mkdir()
    words = [*FAST, "--plugins", "[engine.distributed.test_main_first:prepare]"]
    variables = {"PREPARED": str(folder), "FAILS": str(rank)}
    ended = start_ranks(runs.root, 3, runs.words(*words), environment=variables)
    assert ended.codes == [1, 1, 1] and max(ended.seconds) - min(ended.seconds) < 10
    assert f"rank {rank} failed" in ended.texts[0] and "cannot be prepared" in ended.texts[0]
    assert (folder / "made").exists() == (rank == 2)


def test_one_process() -> None:
    """Alone, it is nothing."""
    with distributed.main_first(Rank()):
        entered = True
    assert entered
