"""--dist.simulate: the corners of a plan, what is refused, and a thousand ranks that share each weight."""

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from torch import Tensor

from common.checkpoint.file import write_checkpoint
from common.data.order import EpochOrder
from common.data.plan import EpochPlan
from common.progress import Position
import train
from tests.conftest import ErrorOf, Runs
from tests.samples import Digits
from tests.tools.test_scale import agrees

ME = __name__


class Stream:
    """Digits that can only be read in order, by every reader."""

    def __init__(self, data_dir: Path, mode: str) -> None:
        self.digits = Digits(data_dir, mode)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(40):
            yield self.digits[index]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--loader.drop_last", "true"], ["--dist.strategy", "fsdp"]], ids=" ".join)
def test_three_real_ranks(runs: Runs, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    agrees(runs, monkeypatch, 3, *words)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--dist.strategy", "fsdp"], ["--dist.random_seed", "null"]], ids=" ".join)
def test_a_thousand_ranks(runs: Runs, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """The last ranks hold nothing of weights that are shared by rows."""
    assert train.main(runs.words("--dist.simulate", "1000", "--dist.rank", "731", *words)) == 0
    weights = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  weights")]
    assert (weights == [["weights", "0.000"]]) == ("fsdp" in words)


def test_one_rank(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(runs.words("--dist.simulate", "1", "--dist.reduction", "fixed", "--optim.accumulate", "2")) == 0
    assert "a step takes 64 samples: 32 x 2 accumulated; steps per epoch: 3" in capsys.readouterr().out


@pytest.mark.parametrize(("size", "batch_size"), [(1000, 1), (129_999, 16)])
def test_the_last_step_is_dropped_on_all_ranks(size: int, batch_size: int) -> None:
    order = EpochOrder({"type": "shuffle"}, range(size), 7)
    plan = EpochPlan(order, batch_size=batch_size, world_size=1000, drop_last=True)
    used = size - size % plan.samples_per_step
    assert sorted(chain.from_iterable(plan.shares(Position()))) == sorted(order(0)[:used].tolist())


def test_wrong_shares_are_an_error(error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.data.plan.evaluation_keys", lambda *given: [(0, [0])])
    assert "val: sample 0 is not read exactly once over all ranks" in error_of("--dist.simulate", "4")


MISTAKES = {
    "no ranks": (["--dist.simulate", "0"], "dist.simulate = 0 (command line: --dist.simulate 0) must be greater"),
    "no number of ranks": (["--dist.rank", "3"], "rank needs simulate"),
    "processes": (["--dist.simulate", "3", "--dist.processes", "3"], "leave out dist.processes"),
    "a GPU": (["--dist.simulate", "3", "--gpu_ids", "99"], "gpu_ids: 99"),
    "a stream": (["--dist.simulate", "3", "--dataset.train", f"{{type: {ME}.Stream}}"], "has no method share"),
    "no step": (["--dist.simulate", "9", "--loader.drop_last", "true"], "an epoch has no optimizer step: 160 samples"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(error_of: ErrorOf, mistake: str) -> None:
    words, text = MISTAKES[mistake]
    assert text in error_of(*words)


def test_under_a_launcher_and_in_an_evaluation(
    error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.pt"
    write_checkpoint({}, weights)
    words = ["--config", "tests/base.yaml", "--model_pt", str(weights), "--dist.simulate", "3"]
    assert "only train.py can simulate ranks" in error_of(*words, program="evaluate")
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setitem(os.environ, name, value)
    assert "one process simulates 3; start it with python train.py" in error_of("--dist.simulate", "3")
